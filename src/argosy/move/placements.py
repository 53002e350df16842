"""Torch tensors as boxes: what this process holds of a plain tensor, a DTensor or a list of pieces.

`reshard` and `bundles` ask here; this is the one file of resharding that knows DTensor, and `PRIVATE_TORCH` names what it uses
of torch without a promise (a contract test looks after it). Reads metadata only: no element is touched, nobody is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
import torch

from argosy.errors import ArgosyError, ConfigError, MismatchError, NoRoute
from argosy.move.boxes import Box, Cut, Held, Owner, TensorSpec, held_by, sharded, whole
from argosy.move.mapping import has_overlap

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PRIVATE_TORCH = ("torch.distributed.tensor.placement_types._StridedShard",)
"""Names that torch may change without notice."""


class Pieces:
    """A global tensor of which this process holds several boxes, each in a local tensor of its own.

    `parts` are (offsets, tensor) pairs; a trainer's pages are such parts.
    """

    def __init__(
        self, shape: Sequence[int], parts: Sequence[tuple[Sequence[int], torch.Tensor]]
    ) -> None:
        self.shape = tuple(shape)
        self.parts = [(tuple(offsets), tensor) for offsets, tensor in parts]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
Value = torch.Tensor | Pieces
State = Mapping[str, Any]


class Local(msgspec.Struct, frozen=True, array_like=True):
    """What one process says of one tensor: its global shape and dtype, how it is laid out, and the boxes it holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    held: tuple[Held, ...]


def check_states(source: object, destination: object, wire: object) -> None:
    """Refuse what is no state at all: a module is a likely slip."""
    for side, given in (("source", source), ("destination", destination), ("wire", wire)):
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"the {side} is a {type(given).__name__}, not a dict of tensors by name",
                fix="give module.state_dict(), or bundles.flatten(…) with an optimizer's state",
            )
        unnamed = [key for key in given if not isinstance(key, str)]
        if unnamed:
            raise ConfigError(
                f"the {side} has {unnamed[0]!r} for a name", fix="name tensors by texts"
            )


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed; whoever has not imported them, which takes most of a second, has none."""
    if type(value) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def describe(name: str, value: object, *, is_destination: bool) -> Local:
    """What this process holds of a tensor; refuses what cannot be moved, by name."""
    if isinstance(value, Pieces):
        return _describe_pieces(name, value, is_destination)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, not a tensor",
            fix="put tensors, DTensors or move.Pieces into the state; send plain values by yourself",
        )
    if is_dtensor(value):
        return _describe_dtensor(name, value, is_destination)
    _check_tensor(name, value, is_destination)
    held = whole(tuple(value.shape), value.stride())
    return Local(name, tuple(value.shape), dtype_name(value.dtype), "plain", held)


def buffers(value: Value) -> list[torch.Tensor]:
    """The local tensors that the boxes of `describe` lie in."""
    if isinstance(value, Pieces):
        return [tensor.detach() for _, tensor in value.parts]
    if not is_dtensor(value):
        return [value.detach()]
    with torch.no_grad():
        return [value.to_local().detach()]


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory it lies in here, to be looked at: itself, unless it is distributed."""
    if not is_dtensor(value):
        return value
    return buffers(value)[0]


def like(value: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as `value` over other local memory."""
    if not is_dtensor(value):
        return local
    return type(value).from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def assemble(said: Sequence[Sequence[Local]], hosts: Sequence[str], side: str) -> list[TensorSpec]:
    """Specs from what each rank said; `MismatchError` names the ranks that contradict each other."""
    first: dict[str, tuple[int, Local]] = {}
    owners: dict[str, list[Owner]] = {}
    for rank, mine in enumerate(said):
        for local in mine:
            before_rank, before = first.setdefault(local.name, (rank, local))
            for what in ("shape", "dtype", "layout"):
                ours, theirs = getattr(local, what), getattr(before, what)
                if ours != theirs:
                    raise MismatchError(
                        f"{local.name} in the {side}: rank {before_rank} has {what} {theirs}, rank {rank} has {ours}",
                        fix=f"give all ranks the same {what}; leave a tensor out where a rank has no part of it",
                    )
            if local.held:
                owners.setdefault(local.name, []).append(Owner(rank, hosts[rank], local.held))
    return [
        TensorSpec(
            name=name, shape=local.shape, dtype=local.dtype, owners=tuple(owners.get(name, ()))
        )
        for name, (_, local) in first.items()
    ]


def spec_of(name: str, tensor: torch.Tensor, hosts: Sequence[str] | None = None) -> TensorSpec:
    """The whole spec of a DTensor from its mesh alone, with contiguous local tensors: for plans made in advance.

    A plain tensor is held whole by rank 0. `hosts[rank]` is a rank's host; one host without it.
    """
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    if not is_dtensor(tensor):
        owner = Owner(0, hosts[0] if hosts else "", whole(shape))
        return TensorSpec(name=name, shape=shape, dtype=dtype, owners=(owner,))
    mesh = tensor.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    cuts = _cuts(name, tensor)
    return sharded(name, shape, dtype, mesh=mesh.shape, ranks=ranks, cuts=cuts, hosts=hosts)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`torch.float32` for `float32`."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name} is no dtype of this torch", fix="use a name like bfloat16")
    return found


def _describe_dtensor(name: str, value: DTensor, is_destination: bool) -> Local:
    mesh, shape = value.device_mesh, tuple(value.shape)
    cuts = _cuts(name, value)
    coordinate = mesh.get_coordinate()
    layout = f"mesh {mesh.mesh.tolist()} with {', '.join(map(str, value.placements))}"
    held: tuple[Held, ...] = ()
    if coordinate is not None:
        (local,) = buffers(value)
        _check_tensor(name, local, is_destination)
        held = held_by(shape, mesh.shape, cuts, coordinate, local.stride())
        wanted, given = sum(one.box.volume for one in held), local.numel()
        if wanted != given:
            raise ConfigError(
                f"{name}: the local tensor has shape {tuple(local.shape)}, but {layout} of shape {shape} gives this rank {wanted} elements",
                fix="make DTensors with distribute_tensor, or from_local with shape= and stride=",
            )
    return Local(name, shape, dtype_name(value.dtype), layout, held)


def _cuts(name: str, tensor: DTensor) -> list[Cut]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found = []
    for placement in tensor.placements:
        if isinstance(placement, _StridedShard):
            found.append(Cut(placement.dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            found.append(Cut(placement.dim))
        elif isinstance(placement, Replicate):
            found.append(Cut())
        else:
            raise ConfigError(
                f"{name} has the placement {placement}, which is not a part of a finished tensor",
                fix="redistribute it to Replicate() or Shard() first",
            )
    return found


def _describe_pieces(name: str, value: Pieces, is_destination: bool) -> Local:
    held: list[Held] = []
    dtypes = {tensor.dtype for _, tensor in value.parts}
    if len(dtypes) > 1:
        raise ConfigError(
            f"the pieces of {name} have several dtypes: {', '.join(sorted(map(str, dtypes)))}",
            fix="use one dtype for all pieces of a tensor",
        )
    if not dtypes:
        raise ConfigError(f"{name} has no pieces here", fix="leave it out on this rank")
    for number, (offsets, tensor) in enumerate(value.parts):
        _check_tensor(f"piece {number} of {name}", tensor, is_destination)
        box = Box(offsets, tuple(tensor.shape))
        is_inside = len(offsets) == len(value.shape) == tensor.dim() and all(
            begin >= 0 and end <= size
            for begin, end, size in zip(offsets, box.stops, value.shape, strict=True)
        )
        if not is_inside:
            raise ConfigError(
                f"piece {number} of {name} is {box}, outside the shape {value.shape}",
                fix="give offsets of the global tensor, one per dim",
            )
        twin = next((h for h in held if is_destination and h.box.intersect(box)), None)
        if twin is not None:
            raise ConfigError(
                f"pieces {twin.buffer} and {number} of {name} both hold {twin.box.intersect(box)}",
                fix="give each element of the destination to one piece",
            )
        if box.volume:
            held.append(Held(box, 0, tensor.stride(), number))
    return Local(name, value.shape, dtype_name(dtypes.pop()), "pieces", tuple(held))


def _check_tensor(name: str, tensor: torch.Tensor, is_destination: bool) -> None:
    """Refuse what has no plain memory on this host, and a destination whose elements share memory."""
    failure: ArgosyError | None = None
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        failure = ConfigError(f"{name} is a {kind} tensor", fix="make it dense first: to_dense()")
    elif tensor.device.type != "cpu":
        failure = NoRoute(
            f"{name} is on {tensor.device}: tensors move between the memories of processes",
            fix="copy it to the CPU first",
        )
    elif tensor.is_conj() or tensor.is_neg():
        failure = ConfigError(
            f"{name} is a lazy conjugate or negative", fix="use resolve_conj(), resolve_neg()"
        )
    elif is_destination and has_overlap(tensor.shape, tensor.stride()):
        failure = ConfigError(
            f"{name} has elements that share memory (strides {tensor.stride()})",
            fix="use a destination of its own memory: contiguous() or clone()",
        )
    if failure is not None:
        raise failure
