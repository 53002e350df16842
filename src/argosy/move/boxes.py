"""Sharded tensors as boxes: which part of a global tensor lies where in whose memory.

`placements` reads torch tensors into these values, `plans` intersects them, the checkpoint's reader will use the same ones.
Pure: numbers in, numbers out; no torch, no process, no clock. A box is half-open in every dim, and a box of volume zero is
never held by anybody.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import msgspec

from argosy.errors import ConfigError


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A rectangular part of a global tensor; a scalar's box has no dims and the volume one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """The first offsets behind it."""
        return tuple(map(int.__add__, self.offsets, self.sizes))

    def intersect(self, other: Box) -> Box | None:
        """The part that both have, or None."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(int.__sub__, map(min, self.stops, other.stops), offsets))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def subtract(self, other: Box) -> list[Box]:
        """This box without the other: at most two boxes per dim, disjoint."""
        cut = self.intersect(other)
        if cut is None:
            return [self]
        rest = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim in range(len(sizes)):
            low, high = cut.offsets[dim], cut.offsets[dim] + cut.sizes[dim]
            stop = offsets[dim] + sizes[dim]
            for begin, end in ((offsets[dim], low), (high, stop)):
                if begin < end:
                    rest.append(
                        Box(
                            (*offsets[:dim], begin, *offsets[dim + 1 :]),
                            (*sizes[:dim], end - begin, *sizes[dim + 1 :]),
                        )
                    )
            offsets[dim], sizes[dim] = low, high - low
        return rest

    def __str__(self) -> str:
        if not self.sizes:
            return "[]"
        pairs = zip(self.offsets, self.stops, strict=True)
        return "[" + ", ".join(f"{begin}:{end}" for begin, end in pairs) + "]"


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A box in its owner's memory: element `start` of local tensor number `buffer`, with strides in elements."""

    box: Box
    start: int
    strides: tuple[int, ...]
    buffer: int = 0

    def at(self, offsets: Sequence[int]) -> int:
        """Where the element with these global offsets lies."""
        steps = map(int.__sub__, offsets, self.box.offsets)
        return self.start + sum(map(int.__mul__, steps, self.strides))


class Owner(msgspec.Struct, frozen=True, array_like=True):
    """A process that holds boxes of a tensor: its rank, its host, and where the boxes lie."""

    rank: int
    host: str
    held: tuple[Held, ...]


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One global tensor: its shape, its dtype by torch's name, and who holds what."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    owners: tuple[Owner, ...]

    def layout(self) -> bytes:
        """Equal for tensors that differ only in name and dtype: they share one pattern of overlaps."""
        return digest_of((self.shape, self.owners))

    def digest(self) -> bytes:
        """Equal for equal specs, in every process."""
        return digest_of(self)


def digest_of(value: object) -> bytes:
    """A key for caches, equal in every process for equal values."""
    return hashlib.sha256(msgspec.msgpack.encode(value)).digest()


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def whole(shape: Sequence[int], strides: Sequence[int] | None = None) -> tuple[Held, ...]:
    """What a process holds that has the whole tensor in one piece."""
    box = Box((0,) * len(shape), tuple(shape))
    if not box.volume:
        return ()
    return (Held(box, 0, row_major(shape) if strides is None else tuple(strides)),)


def contiguous_runs(box: Box, held: Held) -> Iterator[tuple[int, int]]:
    """(start, length) in elements of each contiguous run of a box in its owner's memory, in row-major order of the box.

    `whole(shape)[0]` as the memory gives the runs in a row-major global array.
    """
    length, outer = 1, len(box.sizes)
    while outer and (box.sizes[outer - 1] == 1 or held.strides[outer - 1] == length):
        outer -= 1
        length *= box.sizes[outer]
    first = held.at(box.offsets)
    for steps in product(*(range(size) for size in box.sizes[:outer])):
        yield first + sum(map(int.__mul__, steps, held.strides)), length


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """How one mesh axis cuts a tensor: into chunks along `dim`; `dim` None leaves every process of the axis a replica.

    With `split_factor` above one the dim is first cut into so many pieces, and each of them into chunks: that is how
    a tensor looks that was cut by another axis of the mesh before this one (FSDP over tensor parallelism).
    """

    dim: int | None = None
    split_factor: int = 1


def held_by(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    cuts: Sequence[Cut],
    coordinate: Sequence[int],
    strides: Sequence[int] | None = None,
) -> tuple[Held, ...]:
    """What the process at this coordinate of the mesh holds, in the memory of one local tensor.

    A dim's local extent is a list of global intervals, in local order: one for plain chunks, several when a strided cut
    interleaves. Each combination of intervals is a box. `strides` are the local tensor's; contiguous unless told.
    """
    if len(cuts) != len(mesh_shape) or len(coordinate) != len(mesh_shape):
        raise ConfigError(
            f"{len(cuts)} placements and a coordinate of {len(coordinate)} axes do not fit a mesh of shape {tuple(mesh_shape)}",
            fix="give one placement per mesh axis",
        )
    extents: list[list[tuple[int, int]]] = [[(0, size)] for size in shape]
    for cut, chunks, index in zip(cuts, mesh_shape, coordinate, strict=True):
        if cut.dim is None:
            continue
        if not 0 <= cut.dim < len(shape):
            raise ConfigError(
                f"a placement cuts dim {cut.dim} of a tensor with shape {tuple(shape)}",
                fix=f"use a dim between 0 and {len(shape) - 1}, or replicate",
            )
        extent = extents[cut.dim]
        pieces = (
            [chunk_of(extent, cut.split_factor, part) for part in range(cut.split_factor)]
            if cut.split_factor > 1
            else [extent]
        )
        extents[cut.dim] = joined(
            interval for piece in pieces for interval in chunk_of(piece, chunks, index)
        )
    local = [sum(end - begin for begin, end in extent) for extent in extents]
    steps = row_major(local) if strides is None else tuple(strides)
    placed = [_with_local_offsets(extent) for extent in extents]
    found = []
    for choice in product(*placed):
        box = Box(tuple(begin for begin, _, _ in choice), tuple(end - b for b, end, _ in choice))
        start = sum(step * at for step, (_, _, at) in zip(steps, choice, strict=True))
        if box.volume:
            found.append(Held(box, start, steps))
    return tuple(found)


def chunk_of(extent: list[tuple[int, int]], chunks: int, index: int) -> list[tuple[int, int]]:
    """Chunk number `index` of an extent, in torch.chunk's sizes: equal ones, the last ones smaller or empty."""
    size = sum(end - begin for begin, end in extent)
    width = -(-size // chunks)
    low, high = min(size, width * index), min(size, width * (index + 1))
    found, passed = [], 0
    for begin, end in extent:
        first, last = max(low - passed, 0), min(high - passed, end - begin)
        if first < last:
            found.append((begin + first, begin + last))
        passed += end - begin
    return found


def joined(extent: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring intervals as one."""
    found: list[tuple[int, int]] = []
    for begin, end in extent:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _with_local_offsets(extent: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    found, passed = [], 0
    for begin, end in extent:
        found.append((begin, end, passed))
        passed += end - begin
    return found


def sharded(
    name: str,
    shape: Sequence[int],
    dtype: str,
    *,
    mesh: Sequence[int],
    ranks: Sequence[int] | None = None,
    cuts: Sequence[Cut],
    hosts: Sequence[str] | None = None,
) -> TensorSpec:
    """The spec of a tensor laid over a mesh; `ranks` are its processes in row-major order (0, 1, … unless told).

    `hosts[rank]` is the host of a rank; without it all ranks are on one host.
    """
    count = math.prod(mesh)
    members = range(count) if ranks is None else ranks
    if len(members) != count:
        raise ConfigError(
            f"{name}: a mesh of shape {tuple(mesh)} has {count} processes, {len(members)} ranks were given",
            fix="give one rank per place of the mesh",
        )
    owners = []
    for rank, coordinate in zip(members, product(*(range(n) for n in mesh)), strict=True):
        held = held_by(shape, mesh, cuts, coordinate)
        owners.append(Owner(rank, hosts[rank] if hosts else "", held))
    return TensorSpec(name=name, shape=tuple(shape), dtype=dtype, owners=tuple(owners))
