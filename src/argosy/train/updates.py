"""The user's own optimizer, run on whole parameters from one version of the state into the next.

Every rank has every master parameter; it updates those it owns and leaves the others without a gradient. Before an update the owned fields are copied into the new version, then the
optimizer works in place there: the old version is never written, so a crash in the middle is repaired by doing it again. Knows nothing of ranks or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import torch

from argosy.checkpoint.optimizers import STRUCTURE
from argosy.errors import ConfigError
from argosy.train.memories import Version
from argosy.train.stateplan import Field, Kind

Factory = Callable[["MasterParameters"], torch.optim.Optimizer]
_KINDS: dict[type, tuple[Kind, torch.dtype]] = {
    bool: ("bool", torch.int64),
    int: ("int", torch.int64),
    float: ("float", torch.float64),
}


class MasterParameters(list[torch.nn.Parameter]):
    """What an optimizer is made with: all master parameters, in the order of the model."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__(named.values())
        self._named = dict(named)

    def named(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) pairs."""
        return list(self._named.items())

    def where(self, wanted: Callable[[str, torch.nn.Parameter], bool]) -> list[torch.nn.Parameter]:
        """Those for which `wanted(name, parameter)` is true."""
        return [p for name, p in self._named.items() if wanted(name, p)]

    def decayed(self, weight_decay: float) -> list[dict[str, Any]]:
        """Two groups: matrices with this weight decay, vectors (norms, biases) without."""
        matrices = self.where(lambda _, p: p.dim() >= 2)
        vectors = self.where(lambda _, p: p.dim() < 2)
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]


class Updater:
    """One optimizer and the parameters it updates."""

    def __init__(
        self, name: str, factory: Factory | None, masters: dict[str, torch.nn.Parameter]
    ) -> None:
        self.name = name
        self._masters = masters
        if not callable(factory):
            raise ConfigError(
                f"optimizer= is {type(factory).__name__}, not a function that makes one",
                fix="optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4): it is made for master copies of the parameters",
            )
        self.optimizer = factory(MasterParameters(masters))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer= returned {type(self.optimizer).__name__}, not a torch optimizer",
                fix="return torch.optim.AdamW(params, …), for example",
            )
        self.names = self._find_names()
        self._rates = [_rate(group) for group in self.optimizer.param_groups]
        self._bound: list[torch.nn.Parameter] = []
        self._homes: dict[tuple[Version, str], _Home] = {}

    def probe(self) -> list[Field]:
        """What the optimizer keeps for each parameter, found by steps on zeros that touch nothing: one for all of a group that are alike."""
        groups = self.optimizer.param_groups
        name_of = {id(p): name for name, p in self._masters.items()}
        found: list[Field] = []
        try:
            for group in groups:
                known: dict[tuple[object, ...], list[Field]] = {}
                for parameter in group["params"]:
                    name = name_of[id(parameter)]
                    form = (parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
                    if form not in known:
                        known[form] = self._probe_one(group, parameter, name)
                    found += [msgspec.structs.replace(field, name=name) for field in known[form]]
        finally:
            self.optimizer.param_groups = groups
        return found

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Names and settings of each group, with the learning rate that schedules are factors of."""
        name_of = {id(p): name for name, p in self._masters.items()}
        found = []
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            settings = {key: value for key, value in group.items() if key not in STRUCTURE}
            if "lr" in settings:
                settings["lr"] = rate
            found.append(([name_of[id(p)] for p in group["params"]], settings))
        return found

    def update(
        self,
        old: Version,
        new: Version,
        gradients: Mapping[str, torch.Tensor | None],
        factor: float,
    ) -> None:
        """Make these parameters' next version; None is a parameter that no lane has touched."""
        for parameter in self._bound:
            parameter.grad = None
        self._bound = [self._masters[name] for name in gradients]
        new.copy_from(old, *gradients)
        for name, gradient in gradients.items():
            self._bind(new, name, gradient)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            _set_rate(group, rate, factor)
        self.optimizer.step()
        for name in gradients:
            self._settle(new, name)

    def _bind(self, version: Version, name: str, gradient: torch.Tensor | None) -> None:
        parameter, home = self._masters[name], self._home(version, name)
        parameter.data = home.value
        parameter.grad = None if gradient is None else gradient.view(parameter.shape)
        if version.has_begun(name):
            self.optimizer.state[parameter] = home.load()
        else:
            self.optimizer.state.pop(parameter, None)

    def _settle(self, version: Version, name: str) -> None:
        """What the optimizer has put elsewhere comes into the version; mostly nothing, since it works in place."""
        parameter, home = self._masters[name], self._home(version, name)
        if parameter.data_ptr() != home.address:
            home.value.copy_(parameter.detach())
        state = self.optimizer.state.get(parameter)
        parameter.grad = None
        if state:
            home.store(state)
            version.set_begun(name, True)

    def _home(self, version: Version, name: str) -> _Home:
        found = self._homes.get((version, name))
        if found is None:
            found = self._homes[version, name] = _Home(version, name)
        return found

    def _probe_one(
        self, group: dict[str, Any], parameter: torch.nn.Parameter, name: str
    ) -> list[Field]:
        # Of the parameter the optimizer sees no more than its form: what it keeps can depend on nothing else.
        clone = torch.nn.Parameter(torch.zeros_like(parameter))
        clone.grad = torch.zeros_like(parameter)
        alone = {**group, "params": [clone]}
        self.optimizer.param_groups = [alone]
        self._try_step()
        self._refuse_common_state(group, alone)
        return _fields(name, self.optimizer.state.pop(clone, {}))

    def _try_step(self) -> None:
        try:
            self.optimizer.step()
        except TypeError as error:
            raise ConfigError(
                f"{type(self.optimizer).__name__} cannot step by itself: {error}",
                fix='use layout="replicated" and step.gradients()',
            )

    def _refuse_common_state(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """A number that all parameters of a group share would be another one on each rank, and would be lost with it."""
        changed = [
            key
            for key, value in after.items()
            if key != "params" and (key not in before or not _is_same(before[key], value))
        ]
        if changed:
            raise ConfigError(
                f"{type(self.optimizer).__name__} changes {changed[0]!r} of its groups in a step: parameters depend on each other",
                fix='use layout="replicated" with this optimizer',
            )

    def _find_names(self) -> tuple[str, ...]:
        name_of = {id(p): name for name, p in self._masters.items()}
        found = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in name_of:
                    raise ConfigError(
                        f"optimizer {self.name!r} updates a tensor that is no parameter of the model",
                        fix="build it from the params that the function is given",
                    )
                found.append(name_of[id(parameter)])
        order = {name: place for place, name in enumerate(self._masters)}
        return tuple(sorted(found, key=order.__getitem__))


class _Home:
    """Where a version has one parameter and what the optimizer keeps for it."""

    def __init__(self, version: Version, name: str) -> None:
        self._name = name
        self.value = version.tensor(name)
        self.address = self.value.data_ptr()
        self._fields = [(f, t) for f, t in version.fields_of(name) if _is_of_optimizer(f)]
        self._tensors = {f.key: t for f, t in self._fields if f.kind == "tensor"}
        self._has_tensors_alone = len(self._tensors) == len(self._fields)

    def load(self) -> dict[str, Any]:
        """The optimizer's state, to be changed in place."""
        if self._has_tensors_alone:
            return dict(self._tensors)
        return {field.key: read_field(field, tensor) for field, tensor in self._fields}

    def store(self, state: Mapping[str, Any]) -> None:
        """Bring here what lies elsewhere; ConfigError when there is more than was found at first."""
        is_alike = self._has_tensors_alone and len(state) == len(self._tensors)
        if is_alike and all(state.get(key) is tensor for key, tensor in self._tensors.items()):
            return
        for field, tensor in self._fields:
            write_field(field, tensor, state.get(field.key), self._name)
        if len(self._fields) != len(state):
            keys = sorted(set(state) - {field.key for field, _ in self._fields})
            raise ConfigError(
                f"the optimizer began to keep {', '.join(keys)} for {self._name!r} after its first step",
                fix='use layout="replicated" with this optimizer',
            )


def check_disjoint(updaters: Iterable[Updater], names: Iterable[str]) -> None:
    """ConfigError unless every trained parameter belongs to exactly one optimizer."""
    owner: dict[str, str] = {}
    for updater in updaters:
        for name in updater.names:
            if name in owner:
                raise ConfigError(
                    f"parameter {name!r} is updated by optimizers {owner[name]!r} and {updater.name!r}",
                    fix="give each parameter to one of them",
                )
            owner[name] = updater.name
    lost = [name for name in names if name not in owner]
    if lost:
        raise ConfigError(
            f"no optimizer updates {lost[0]!r}"
            + (f" and {len(lost) - 1} more" if lost[1:] else ""),
            fix="give it to an optimizer, or set requires_grad_(False) to freeze it",
        )


def _fields(name: str, state: Mapping[str, Any]) -> list[Field]:
    found = []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            found.append(_field(name, str(key), tuple(value.shape), value.dtype, "tensor"))
        elif value is None:
            found.append(_field(name, str(key), (), torch.int64, "none"))
        elif type(value) in _KINDS:
            kind, dtype = _KINDS[type(value)]
            found.append(_field(name, str(key), (), dtype, kind))
        else:
            raise ConfigError(
                f"the optimizer keeps a {type(value).__name__} as {key!r} of {name!r}",
                fix='use layout="replicated" with this optimizer',
            )
    return found


def _field(name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype, kind: Kind) -> Field:
    text = str(dtype).removeprefix("torch.")
    return Field(name=name, key=key, shape=shape, dtype=text, item_bytes=dtype.itemsize, kind=kind)


def field_of(name: str, key: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Field:
    """A field with the shape of a tensor."""
    return _field(name, key, tuple(tensor.shape), dtype or tensor.dtype, "tensor")


def _is_of_optimizer(field: Field) -> bool:
    return field.key not in ("value", "ema")


def read_field(field: Field, tensor: torch.Tensor) -> Any:
    """What the optimizer keeps there."""
    if field.kind == "tensor":
        return tensor
    if field.kind == "none":
        return None
    number = tensor.item()
    return bool(number) if field.kind == "bool" else number


def write_field(field: Field, tensor: torch.Tensor, value: Any, name: str) -> None:
    """Keep what the optimizer has come to; ConfigError when it is of another kind."""
    if field.kind == "none" and value is None:
        return
    if isinstance(value, torch.Tensor) and field.kind == "tensor":
        if value.data_ptr() != tensor.data_ptr():
            tensor.copy_(value)
    elif field.kind in ("int", "float", "bool") and isinstance(value, int | float):
        tensor.fill_(value)
    else:
        raise ConfigError(
            f"the optimizer changed {field.key!r} of {name!r} from {field.kind} to {type(value).__name__}",
            fix='use layout="replicated" with this optimizer',
        )


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left is right or torch.equal(left, right)
    return bool(left == right)


def _rate(group: dict[str, Any]) -> float:
    rate = group.get("lr", 0.0)
    return float(rate)


def _set_rate(group: dict[str, Any], rate: float, factor: float) -> None:
    if "lr" not in group:
        return
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate * factor)
    else:
        group["lr"] = rate * factor
