"""What a rank of a replicated trainer has for itself: the module's own parameters and buffers, and the optimizers that user code steps.

All ranks come to the same bits in them. They are loaded from the committed version when a process joins, and stored into the next one at a commit. Used by replicated.py; knows nothing of ranks or rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from argosy.errors import ConfigError
from argosy.move import arenas
from argosy.move.gathered import values_of
from argosy.move.kernels import copy_crc32c
from argosy.move.layout import Layout
from argosy.train.images import Image, read
from argosy.train.lanes import BUFFER
from argosy.train.memories import Version, Weights
from argosy.train.seeds import mix
from argosy.train.stateplan import VALUE, StatePlan
from argosy.train.updates import Factory, MasterParameters, field_of

_LOCK_BYTES = 4096
Factories = Factory | Mapping[str, Factory] | None


class PrivateWeights(Weights):
    """The module's parameters where they are; of the shared memory only the lock."""

    def __init__(self, arena_name: str, model: torch.nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.tensors = {name: parameter.data for name, parameter in self.parameters.items()}
        self._arena = arenas.create(arena_name, _LOCK_BYTES, scope="run")

    def fill(self) -> None:
        """They are there."""

    def bind(self) -> None:
        """They stay where they are."""


def make_plan(
    trained: Mapping[str, torch.nn.Parameter], buffers: Mapping[str, torch.Tensor]
) -> StatePlan:
    """What a version consists of: values in the module's own dtypes. Optimizers are kept as a whole."""
    values = {**trained, **{BUFFER + name: buffer for name, buffer in buffers.items()}}
    fields = tuple(field_of(name, VALUE, value) for name, value in values.items())
    return StatePlan(names=tuple(values), fields=fields)


class Replica:
    """The private state of one process."""

    def __init__(
        self,
        trained: Mapping[str, torch.nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        optimizer: Factories,
        layout: Layout,
    ) -> None:
        self._parameters = dict(trained)
        self._buffers = {BUFFER + name: buffer for name, buffer in buffers.items()}
        self._layout = layout
        self.values = {name: buffer.clone() for name, buffer in self._buffers.items()}
        """Buffers as they are between two forward passes of lanes, by their name in the layout."""
        made = _make(optimizer, trained)
        self._optimizers = made
        self.optimizer: Any = made if isinstance(optimizer, Mapping) else made.get("")
        """What user code's function made; several by name."""

    @torch.no_grad()
    def load(self, version: Version) -> None:
        """Take everything from a version."""
        for name, parameter in self._parameters.items():
            parameter.copy_(version.tensor(name))
            parameter.grad = None
        for name, value in self.values.items():
            value.copy_(version.tensor(name))
        self._show_buffers()
        image = version.image
        if image is None:
            return
        states = read(image)
        for name, optimizer in self._optimizers.items():
            _load(optimizer, states[name])

    @torch.no_grad()
    def store(self, version: Version, names: list[str]) -> None:
        """Put some parameters and buffers into a version."""
        for name in names:
            value = self.values[name] if name in self.values else self._parameters[name]
            version.tensor(name).copy_(value)

    def image(self) -> Image | None:
        """The optimizers' state as it is now; None: there is none."""
        if not self._optimizers:
            return None
        return Image({name: each.state_dict() for name, each in self._optimizers.items()})

    @property
    def checksum(self) -> int:
        """Of parameters and buffers."""
        tensors = (*self._parameters.values(), *self.values.values())
        return mix(*(copy_crc32c(None, t.detach().contiguous()) for t in tensors))

    @torch.no_grad()
    def take_gradients(self, flat: torch.Tensor, touched: frozenset[str], scale: float) -> None:
        """Let `p.grad` be views of a sum over all lanes, scaled; None where no lane has come to a parameter. Buffers get their mean."""
        found = []
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if name in touched:
                found.append(values_of(flat, self._layout, name))
        if found:
            torch._foreach_mul_(found, scale)
        for name in touched & self._parameters.keys():
            parameter = self._parameters[name]
            span = values_of(flat, self._layout, name).view(parameter.shape)
            parameter.grad = span.to(parameter.dtype)
        for name, value in self.values.items():
            mean = values_of(flat, self._layout, name).view(value.shape)
            value.copy_(mean / self._layout.num_lanes if value.is_floating_point() else mean)
        self._show_buffers()

    def drop_gradients(self) -> None:
        """No parameter has a gradient: an optimizer leaves all of them as they are."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._show_buffers()

    def _show_buffers(self) -> None:
        for name, buffer in self._buffers.items():
            buffer.copy_(self.values[name])


def _make(optimizer: Factories, trained: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
    if optimizer is None:
        return {}
    factories = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
    made: dict[str, Any] = {}
    for name, factory in factories.items():
        if not callable(factory):
            raise ConfigError(
                f"optimizer= is {type(factory).__name__}, not a function that makes one",
                fix="optimizer=lambda params: torch.optim.SGD(params, lr=0.1): a rank that joins makes its own",
            )
        found: Any = factory(MasterParameters(trained))
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(found, method, None)):
                raise ConfigError(
                    f"optimizer= returned {type(found).__name__}, which has no {method}()",
                    fix="return a torch optimizer, or an object with state_dict() and load_state_dict()",
                )
        made[name] = found
    return made


def _load(optimizer: Any, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    # It brings tensors to the dtype of their parameter; here bits must stay.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, kept in state.get("state", {}).items():
        if isinstance(index, int) and set(kept) == set(optimizer.state.get(parameters[index], ())):
            optimizer.state[parameters[index]] = kept
