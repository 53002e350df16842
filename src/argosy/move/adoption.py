"""Moving a module's parameters and buffers into an arena, and pointing a like module at them in another process.

The Parameter objects stay the same, so optimizers, hooks and ties hold; each tensor gets a storage of its own with its own strides; tensors that
overlap in memory go on overlapping. Everything is checked before anything moves. Called by `Arena.adopt` and `Arena.bind` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from argosy.errors import ArenaGone, ConfigError, MismatchError, NoRoute
from argosy.move.directory import Entry, Request
from argosy.move.mapping import has_overlap, span_bytes


class Room(Protocol):
    """What an arena offers here."""

    name: str

    def allocate(self, requests: Sequence[Request]) -> list[Entry]:
        """Entries, all or none."""

    def storage(self, entry: Entry) -> torch.UntypedStorage:
        """Of an entry."""

    def find(self, name: str) -> Entry | None:
        """By name."""

    def tensor(self, name: str) -> torch.Tensor:
        """By name."""

    def is_inside(self, tensor: torch.Tensor) -> bool:
        """By address."""


@dataclass
class _Member:
    """One tensor object of the module, under all its names."""

    tensor: torch.Tensor
    names: list[str]
    start: int = 0
    """Bytes from the beginning of its old storage."""

    @property
    def end(self) -> int:
        return self.start + span_bytes(self.tensor.shape, self.tensor.stride(), self.tensor.dtype)


@dataclass
class _Block:
    """Tensors whose bytes overlap: they move together."""

    members: list[_Member] = field(default_factory=list)

    @property
    def start(self) -> int:
        return min(member.start for member in self.members)

    @property
    def end(self) -> int:
        return max(member.end for member in self.members)


def adopt(room: Room, module: torch.nn.Module, prefix: str) -> list[str]:
    """Move parameters and buffers into the arena; what lies there already stays."""
    members = _members(module, prefix)
    blocks = _blocks([member for member in members if not _is_there(room, member)])
    requests: list[Request] = []
    firsts = []
    for block in blocks:
        firsts.append(len(requests))
        requests.extend(_requests(block, len(requests)))
    entries = room.allocate(requests)
    with torch.no_grad():
        replaced = []
        for block, first in zip(blocks, firsts, strict=True):
            storage = room.storage(entries[first]) if entries[first].num_bytes else None
            replaced.extend(_fill(block, storage))
        for tensor, replacement in replaced:
            tensor.data = replacement
    return [name for member in members for name in member.names]


def bind(room: Room, module: torch.nn.Module, prefix: str) -> list[str]:
    """Point parameters and buffers at the arena's tensors of the same names, after all of them were compared."""
    members = _members(module, prefix)
    found = []
    for member in members:
        for name in member.names:
            if room.find(name) is None:
                raise ArenaGone(
                    f"arena {room.name!r} has no tensor {name!r}",
                    fix="adopt a module of the same architecture first, with the same prefix",
                )
        inside, own = room.tensor(member.names[0]), member.tensor
        ours = (tuple(own.shape), own.dtype)
        theirs = (tuple(inside.shape), inside.dtype)
        if ours != theirs:
            raise MismatchError(
                f"{member.names[0]!r} is {ours} in the module and {theirs} in arena {room.name!r}",
                fix="use a module of the same architecture and dtype",
            )
        found.append((own, inside))
    for own, inside in found:
        own.data = inside
    return [name for member in members for name in member.names]


def _is_there(room: Room, member: _Member) -> bool:
    if member.end == member.start:
        return room.find(member.names[0]) is not None  # without elements: it has no address
    return room.is_inside(member.tensor)


def _members(module: torch.nn.Module, prefix: str) -> list[_Member]:
    """All tensors of the module, each once; refuses what cannot live in an arena."""
    by_object: dict[int, _Member] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        member = by_object.get(id(tensor))
        if member is None:
            refuse_homeless(tensor, prefix + name)
            start = int(tensor.storage_offset()) * tensor.dtype.itemsize
            member = by_object[id(tensor)] = _Member(tensor, [], start)
        member.names.append(prefix + name)
    return list(by_object.values())


def refuse_homeless(tensor: torch.Tensor, name: str) -> None:
    """Raise the error that says why a tensor cannot live in an arena, and what to do."""
    if is_lazy(tensor):
        raise ConfigError(f"{name!r} has no shape yet", fix="run one forward pass before adopting")
    if is_traceable_wrapper_subclass(tensor):
        raise ConfigError(
            f"{name!r} is a {type(tensor).__name__}, which wraps other tensors",
            fix="adopt the module before it is sharded or quantized",
        )
    if tensor.device.type == "meta":
        raise ConfigError(
            f"{name!r} is on the meta device and has no bytes",
            fix="materialise the module first: module.to_empty(device='cpu')",
        )
    if tensor.device.type != "cpu":
        raise NoRoute(
            f"{name!r} is on {tensor.device}: an arena holds memory of the host",
            fix="move the module to the CPU first",
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        layout = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ConfigError(f"{name!r} is {layout}, not dense", fix="use to_dense() or dequantize()")
    if has_overlap(tensor.shape, tensor.stride()):
        raise ConfigError(
            f"{name!r} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: "
            "several of its elements are one place in memory",
            fix="make it plain first: tensor.contiguous() instead of expand()",
        )


def _blocks(members: list[_Member]) -> list[_Block]:
    """Members by overlap of their bytes; in the order of the module."""
    by_storage: dict[int, list[_Member]] = {}
    order = {id(member): index for index, member in enumerate(members)}
    blocks = []
    for member in members:
        address = member.tensor.untyped_storage().data_ptr()
        if member.end == member.start or address == 0:
            blocks.append(_Block([member]))
        else:
            by_storage.setdefault(address, []).append(member)
    for sharing in by_storage.values():
        current: _Block | None = None
        for member in sorted(sharing, key=lambda member: member.start):
            if current is None or member.start >= current.end:
                current = _Block()
                blocks.append(current)
            current.members.append(member)
    return sorted(blocks, key=lambda block: min(order[id(member)] for member in block.members))


def _requests(block: _Block, index: int) -> list[Request]:
    """One allocation, and every further name inside it."""
    requests: list[Request] = []
    is_shared = len(block.members) > 1
    if is_shared:
        requests.append(Request(num_bytes=block.end - block.start))
    for member in block.members:
        if (member.start - block.start) % member.tensor.dtype.itemsize:
            raise ConfigError(
                f"{member.names[0]!r} overlaps {block.members[0].names[0]!r} at an odd byte",
                fix="clone one of them",
            )
        for name in member.names:
            requests.append(
                Request(
                    num_bytes=member.end - member.start,
                    name=name,
                    dtype=str(member.tensor.dtype).removeprefix("torch."),
                    shape=tuple(member.tensor.shape),
                    strides=tuple(member.tensor.stride()),
                    inside=index if requests else -1,
                    shift=member.start - block.start,
                )
            )
    return requests


def _fill(
    block: _Block, storage: torch.UntypedStorage | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """New tensors in the storage with the old values; the module still has the old ones."""
    replaced = []
    for member in block.members:
        old = member.tensor
        if storage is None:
            continue  # no elements: nothing to move
        shift = (member.start - block.start) // old.dtype.itemsize
        new = torch.empty(0, dtype=old.dtype).set_(
            storage, shift, tuple(old.shape), tuple(old.stride())
        )
        new.copy_(old.detach())
        replaced.append((old, new))
    return replaced
