"""Bundles: a parameter with everything that belongs to it, so that its parts never move or commit apart.

Discovered from a model and a torch optimizer by the parameters' true names. Members of the parameter's shape share its one layout and plan; others
get their own; what can be computed from another member is not sent. Decides and names only: `reshard` moves the tensors, `commits` commits them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
import torch

from argosy.errors import ConfigError, MismatchError

Role = Literal["parameter", "master", "state"]
PARAMETER = "parameter"
MASTER = "master"
_SEPARATOR = "//"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a bundle: its role, shape and dtype, the dtype it passes through, and what it is derived from."""

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    wire: str | None = None
    derived_from: str | None = None
    """The member that this one is a cast of; it is computed at the destination instead of being sent."""


class Bundle:
    """One parameter's tensors and scalars by member name. Those of `discover` are the optimizer's, as they are at each look."""

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int | float]
    ) -> None:
        if PARAMETER not in tensors:
            raise ConfigError(f"bundle {name} has no parameter", fix="give it as 'parameter'")
        self.name = name
        self.tensors = dict(tensors)
        self.scalars = scalars

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's global shape."""
        return tuple(self.tensors[PARAMETER].shape)

    def members(self, wire: Mapping[str, torch.dtype] | None = None) -> list[Member]:
        """All members, the parameter first; `wire` is by member name."""
        wires = wire or {}
        found = []
        for name, tensor in self.tensors.items():
            role: Role = "state" if name not in (PARAMETER, MASTER) else name  # type: ignore[assignment]
            found.append(
                Member(
                    name=name,
                    role=role,
                    shape=tuple(tensor.shape),
                    dtype=_name(tensor.dtype),
                    wire=_name(wires[name]) if name in wires else None,
                    derived_from=self._origin(name),
                )
            )
        return found

    def _origin(self, name: str) -> str | None:
        """A low-precision parameter is the cast of its master."""
        master = self.tensors.get(MASTER)
        parameter = self.tensors[PARAMETER]
        if name != PARAMETER or master is None or not parameter.is_floating_point():
            return None
        is_cast = parameter.dtype.itemsize < master.dtype.itemsize
        return MASTER if is_cast and parameter.shape == master.shape else None

    def sent(self) -> dict[str, torch.Tensor]:
        """The members that travel, by member name."""
        derived = {member.name for member in self.members() if member.derived_from}
        return {name: tensor for name, tensor in self.tensors.items() if name not in derived}

    def derive(self) -> None:
        """Compute what was not sent, from what has arrived."""
        with torch.no_grad():
            for member in self.members():
                if member.derived_from is not None:
                    _local(self.tensors[member.name]).copy_(
                        _local(self.tensors[member.derived_from])
                    )


def discover(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    masters: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Bundle]:
    """Bundles of a model's parameters by their names; with the state that the optimizer keeps for each.

    Tensors of one element that are called `step` and plain numbers are scalars; every other tensor is a member, of whatever shape (Adafactor's
    rows and columns too). `masters` are high-precision copies by parameter name: when an optimizer runs on them, its state is theirs.
    """
    high = dict(masters or {})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    unknown = sorted(set(high) - set(names.values()))
    if unknown:
        raise ConfigError(
            f"a master is given for {unknown[0]!r}, which is no parameter of the model",
            fix="name parameters as model.named_parameters() does",
        )
    names |= {id(tensor): name for name, tensor in high.items()}
    states = _states(optimizer, names)
    found = {}
    for name, parameter in model.named_parameters():
        tensors: dict[str, torch.Tensor] = {PARAMETER: parameter}
        if name in high:
            tensors[MASTER] = high[name]
        scalars: list[str] = []
        state = states.get(name, {})
        for key, value in state.items():
            _sort_state(name, key, value, tensors, scalars)
        found[name] = Bundle(name, tensors, _Numbers(state, scalars))
    return found


def flatten(bundles: Mapping[str, Bundle]) -> dict[str, torch.Tensor]:
    """The tensors that travel as one state, named `parameter//member`: what reshard takes."""
    return {
        joined(bundle.name, name): tensor
        for bundle in bundles.values()
        for name, tensor in bundle.sent().items()
    }


def joined(bundle: str, member: str) -> str:
    """The name of a member among those of all bundles."""
    return f"{bundle}{_SEPARATOR}{member}"


def wires(
    bundles: Mapping[str, Bundle], by_member: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Wire dtypes for `flatten`'s names from dtypes by member name (`{"exp_avg": torch.bfloat16}`)."""
    known = {member for bundle in bundles.values() for member in bundle.tensors}
    unknown = sorted(set(by_member) - known)
    if unknown:
        raise ConfigError(
            f"a wire dtype is given for {unknown[0]!r}, which no bundle has",
            fix=f"members are: {', '.join(sorted(known)) or 'none'}",
        )
    return {
        joined(bundle.name, name): by_member[name]
        for bundle in bundles.values()
        for name in bundle.sent()
        if name in by_member
    }


def check_alike(source: Iterable[Bundle], destination: Iterable[Bundle]) -> None:
    """Refuse bundles whose members differ: one would keep old moments beside a new parameter."""
    given = {bundle.name: bundle for bundle in source}
    for bundle in destination:
        other = given.get(bundle.name)
        if other is None:
            continue  # held by another rank, or missing everywhere: the plan says so
        ours, theirs = set(bundle.sent()), set(other.sent())
        if ours != theirs:
            raise MismatchError(
                f"{bundle.name}: the source sends {', '.join(sorted(theirs))}, the destination wants {', '.join(sorted(ours))}",
                fix="use the same kind of optimizer on both sides, after its first step",
            )


def _states(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str]
) -> dict[str, Mapping[str, object]]:
    if optimizer is None:
        return {}
    found: dict[str, Mapping[str, object]] = {}
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    f"parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, is neither in the model nor among the masters",
                    fix="make the optimizer from model.parameters(), or name its tensors in masters=",
                )
            state = optimizer.state.get(parameter)
            if state:
                found[name] = state
    return found


def _sort_state(
    name: str,
    key: str,
    value: object,
    tensors: dict[str, torch.Tensor],
    scalars: list[str],
) -> None:
    if isinstance(value, torch.Tensor):
        if key == "step" and value.numel() == 1:
            scalars.append(key)
        else:
            tensors[key] = value
    elif isinstance(value, (int, float)):
        scalars.append(key)
    elif value is not None:
        raise ConfigError(
            f"{name}: the optimizer keeps a {type(value).__name__} as {key!r}, which cannot be moved",
            fix="use an optimizer whose state is tensors and numbers",
        )


class _Numbers(Mapping[str, int | float]):
    """An optimizer's numbers for one parameter as they are now: a transfer that repeats must not send the first step for ever."""

    def __init__(self, state: Mapping[str, object], names: list[str]) -> None:
        self._state, self._names = state, names

    def __getitem__(self, name: str) -> int | float:
        if name not in self._names:
            raise KeyError(name)
        value = self._state[name]
        return value.item() if isinstance(value, torch.Tensor) else value  # type: ignore[return-value]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = getattr(tensor, "to_local", None)
    return (tensor if local is None else local()).detach()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
