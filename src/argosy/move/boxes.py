"""Sharded tensors as boxes: which part of a global tensor lies where in whose memory.

`placements` reads torch tensors into these values, `plans` intersects them, the checkpoint's reader will use the same ones.
Pure: numbers in, numbers out; no torch, no process, no clock. A box is half-open in every dim, and a box of volume zero is
never held by anybody.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from itertools import product

import msgspec

from argosy.errors import ConfigError


class Box(msgspec.Struct, frozen=True, array_like=True, gc=False):
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


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box in its owner's memory: element `start` of local tensor number `buffer`, with strides in elements."""

    box: Box
    start: int
    strides: tuple[int, ...]
    buffer: int = 0

    def at(self, offsets: Sequence[int]) -> int:
        """Where the element with these global offsets lies."""
        steps = map(int.__sub__, offsets, self.box.offsets)
        return self.start + sum(map(int.__mul__, steps, self.strides))


class Owner(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    if len(coordinate) != len(mesh_shape):
        raise ConfigError(
            f"a coordinate of {len(coordinate)} axes does not fit a mesh of shape {tuple(mesh_shape)}",
            fix="give one index per mesh axis",
        )
    axes = _axes_by_dim(shape, mesh_shape, cuts)
    extents = [
        _extent(size, [(cuts[axis], mesh_shape[axis], coordinate[axis]) for axis in own])
        for size, own in zip(shape, axes, strict=True)
    ]
    local = [_length(extent) for extent in extents]
    return _boxes_of(extents, row_major(local) if strides is None else tuple(strides))


def held_by_all(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut]
) -> list[tuple[Held, ...]]:
    """`held_by` for every coordinate of a mesh in row-major order, contiguous; each dim is cut once, not once per process."""
    axes = _axes_by_dim(shape, mesh_shape, cuts)
    extents: list[dict[tuple[int, ...], list[tuple[int, int]]]] = []
    for size, own in zip(shape, axes, strict=True):
        by_index = {}
        for index in product(*(range(mesh_shape[axis]) for axis in own)):
            steps = zip(own, index, strict=True)
            by_index[index] = _extent(size, [(cuts[a], mesh_shape[a], i) for a, i in steps])
        extents.append(by_index)
    # Axes that only replicate change nothing: their processes hold the same.
    used = [axis for axis, cut in enumerate(cuts) if cut.dim is not None]
    held: dict[tuple[int, ...], tuple[Held, ...]] = {}
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    for index in product(*(range(mesh_shape[axis]) for axis in used)):
        at = dict(zip(used, index, strict=True))
        chosen = [
            by_index[tuple([at[axis] for axis in own])] if own else by_index[()]
            for own, by_index in zip(axes, extents, strict=True)
        ]
        local = tuple([_length(extent) for extent in chosen])
        if local not in strides:
            strides[local] = row_major(local)
        held[index] = _boxes_of(chosen, strides[local])
    coordinates = product(*(range(count) for count in mesh_shape))
    if len(used) == len(mesh_shape):
        return [held[coordinate] for coordinate in coordinates]
    return [held[tuple([coordinate[axis] for axis in used])] for coordinate in coordinates]


def _axes_by_dim(
    shape: Sequence[int], mesh_shape: Sequence[int], cuts: Sequence[Cut]
) -> list[list[int]]:
    """Mesh axes that cut each dim, in order."""
    if len(cuts) != len(mesh_shape):
        raise ConfigError(
            f"{len(cuts)} placements do not fit a mesh of shape {tuple(mesh_shape)}",
            fix="give one placement per mesh axis",
        )
    axes: list[list[int]] = [[] for _ in shape]
    for axis, cut in enumerate(cuts):
        if cut.dim is None:
            continue
        if not 0 <= cut.dim < len(shape):
            raise ConfigError(
                f"a placement cuts dim {cut.dim} of a tensor with shape {tuple(shape)}",
                fix=f"use a dim between 0 and {len(shape) - 1}, or replicate",
            )
        axes[cut.dim].append(axis)
    return axes


def _extent(size: int, steps: Sequence[tuple[Cut, int, int]]) -> list[tuple[int, int]]:
    """What is left of a dim after (cut, chunks, index) of each axis: global intervals in local order."""
    extent = [(0, size)]
    for cut, chunks, index in steps:
        if cut.split_factor == 1:
            extent = chunk_of(extent, chunks, index)
        else:
            pieces = [chunk_of(extent, cut.split_factor, part) for part in range(cut.split_factor)]
            extent = joined(
                interval for piece in pieces for interval in chunk_of(piece, chunks, index)
            )
    return extent


def _boxes_of(
    extents: Sequence[list[tuple[int, int]]], strides: tuple[int, ...]
) -> tuple[Held, ...]:
    """A box for each combination of intervals, in the memory of one local tensor with these strides."""
    if max(map(len, extents), default=1) == 1 and [] not in extents:
        offsets = tuple([extent[0][0] for extent in extents])
        sizes = tuple([extent[0][1] - extent[0][0] for extent in extents])
        return () if 0 in sizes else (Held(Box(offsets, sizes), 0, strides),)
    found = []
    for choice in product(*map(_with_local_offsets, extents)):
        box = Box(tuple(begin for begin, _, _ in choice), tuple(end - b for b, end, _ in choice))
        start = sum(step * at for step, (_, _, at) in zip(strides, choice, strict=True))
        if box.volume:
            found.append(Held(box, start, strides))
    return tuple(found)


def _length(extent: list[tuple[int, int]]) -> int:
    if len(extent) == 1:
        return extent[0][1] - extent[0][0]
    return sum(end - begin for begin, end in extent)


def chunk_of(extent: list[tuple[int, int]], chunks: int, index: int) -> list[tuple[int, int]]:
    """Chunk number `index` of an extent, in torch.chunk's sizes: equal ones, the last ones smaller or empty."""
    if len(extent) == 1:
        begin, end = extent[0]
        width = -((begin - end) // chunks)
        first, last = begin + width * index, min(end, begin + width * (index + 1))
        return [(first, last)] if first < last else []
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
    places = [hosts[rank] for rank in members] if hosts else None
    owners = _owners(
        tuple(shape),
        tuple(mesh),
        tuple(cuts),
        None if ranks is None else tuple(ranks),
        None if places is None else tuple(places),
    )
    return TensorSpec(name=name, shape=tuple(shape), dtype=dtype, owners=owners)


@functools.lru_cache(maxsize=64)
def _owners(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    cuts: tuple[Cut, ...],
    ranks: tuple[int, ...] | None,
    places: tuple[str, ...] | None,
) -> tuple[Owner, ...]:
    """A model has many tensors of few shapes: those share one tuple."""
    held = held_by_all(shape, mesh, cuts)
    members = range(len(held)) if ranks is None else ranks
    hosts = [""] * len(held) if places is None else places
    return tuple(map(Owner, members, hosts, held))
