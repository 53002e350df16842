"""Plans: which process copies which box from which other, so that nothing is read twice and nothing is missing.

`reshard` carries them out; `plan()` is the same pure function on every process, so nobody has to send one. Plans depend on
shapes, layouts, hosts and membership only and are kept under `key()`. Never opens, copies or waits.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from argosy.errors import ConfigError, MismatchError
from argosy.move.boxes import Box, Held, TensorSpec, digest_of
from argosy.move.dtypes import can_cast, itemsize, narrower
from argosy.move.overlaps import (
    HOST,
    REMOTE,
    RESIDENT,
    SHARED,
    Overlap,
    Overlaps,
    Place,
    Route,
)


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """One strided pass: sizes, and where it starts and steps (elements) in a source's and a destination's buffer."""

    tensor: str
    sizes: tuple[int, ...]
    source_rank: int
    source_buffer: int
    source_start: int
    source_strides: tuple[int, ...]
    buffer: int
    start: int
    strides: tuple[int, ...]
    how: str = HOST

    @property
    def volume(self) -> int:
        """Elements."""
        return Box((), self.sizes).volume


class RankPlan(msgspec.Struct, frozen=True):
    """What one process does: the copies it makes, the ranks it reads from, the ranks that read from it."""

    rank: int
    copies: tuple[Copy, ...]
    reads_from: tuple[int, ...]
    read_by: tuple[int, ...]


class TensorPlan:
    """The routes of one tensor: those that its layout settles, and those chosen for it."""

    def __init__(
        self,
        source: TensorSpec,
        destination: TensorSpec,
        overlaps: Overlaps,
        wire: str,
    ) -> None:
        self.source = source
        self.destination = destination
        self.wire = wire
        self.overlaps = overlaps
        self.chosen: list[Route] = []

    def routes_to(self, rank: int) -> list[Route]:
        """What this process takes."""
        chosen = [route for route in self.chosen if route.destination[0] == rank]
        return [*self.overlaps.settled.get(rank, ()), *chosen]

    def readers_of(self, rank: int) -> set[int]:
        """The processes that read from this one."""
        chosen = {route.destination[0] for route in self.chosen if route.source[0] == rank}
        return self.overlaps.readers.get(rank, set()) | (chosen - {rank})

    @property
    def num_pieces(self) -> int:
        """Routes, before neighbours are joined."""
        return sum(map(len, self.overlaps.settled.values())) + len(self.chosen)

    def bytes_by_way(self) -> dict[str, int]:
        """Bytes of the wire dtype, for each way."""
        found = defaultdict(int, self.overlaps.volumes)
        for route in self.chosen:
            found[route.how] += route.box.volume
        size = itemsize(self.wire)
        return {how: volume * size for how, volume in found.items()}

    @property
    def lower_bound(self) -> int:
        """Bytes that the destination's processes want and do not hold already."""
        missing = self.overlaps.wanted_volume - self.overlaps.volumes[RESIDENT]
        return missing * itemsize(self.wire)


class Plan:
    """How a source becomes a destination, tensor by tensor."""

    def __init__(self, tensors: Mapping[str, TensorPlan], key: str) -> None:
        self.tensors = dict(tensors)
        self.key = key
        self._ways: dict[str, dict[str, int]] = {n: t.bytes_by_way() for n, t in tensors.items()}

    def __repr__(self) -> str:
        return f"<plan for {len(self.tensors)} tensors: {_size(self.bytes)} move>"

    @property
    def bytes(self) -> int:
        """Bytes that cross from one process to another, in wire dtypes."""
        return sum(sum(w.values()) - w.get(RESIDENT, 0) for w in self._ways.values())

    @property
    def bytes_between_hosts(self) -> int:
        """The part of `bytes` that comes from another host: what replicas of one host share is in it once."""
        return sum(way.get(REMOTE, 0) for way in self._ways.values())

    @property
    def lower_bound(self) -> int:
        """Sum of the destination's volume that its processes do not hold already, in bytes of the wire dtypes."""
        return sum(tensor.lower_bound for tensor in self.tensors.values())

    @property
    def visited(self) -> int:
        """Boxes that planning looked at; tensors of equal layout are looked at once."""
        return sum(
            o.visited for o in {id(t.overlaps): t.overlaps for t in self.tensors.values()}.values()
        )

    def for_rank(self, rank: int) -> RankPlan:
        """What this process does, neighbours joined, in an order in which processes start at different sources."""
        copies: list[Copy] = []
        read_by: set[int] = set()
        for name, tensor in self.tensors.items():
            sources = {owner.rank: owner.held for owner in tensor.source.owners}
            takers = {owner.rank: owner.held for owner in tensor.destination.owners}
            mine = [
                _copy(name, route, takers if route.how == SHARED else sources, takers)
                for route in tensor.routes_to(rank)
            ]
            read_by |= tensor.readers_of(rank)
            copies += coalesce(mine)
        reads_from = sorted({copy.source_rank for copy in copies} - {rank})
        # Neighbours begin with different sources, so that one process's memory is not everybody's first.
        copies.sort(key=lambda copy: (copy.source_rank - rank) % (1 << 30))
        return RankPlan(rank, tuple(copies), tuple(reads_from), tuple(sorted(read_by)))

    def explain(self) -> str:
        """A table for people: bytes per tensor and way, and the sum over the lower bound."""
        head = (
            "tensor",
            "shape",
            "dtype",
            "pieces",
            "resident",
            "host",
            "between hosts",
            "shared",
            "over bound",
        )
        rows: list[tuple[str, ...]] = [head]
        for name, tensor in self.tensors.items():
            way = self._ways[name]
            moved = sum(way.values()) - way.get(RESIDENT, 0)
            cast = tensor.source.dtype
            if tensor.destination.dtype != cast:
                cast += f"→{tensor.destination.dtype}"
            cells = [name, "×".join(map(str, tensor.source.shape)) or "scalar", cast]
            cells.append(str(tensor.num_pieces))
            cells += [_size(way.get(how, 0)) for how in (RESIDENT, HOST, REMOTE, SHARED)]
            rows.append((*cells, _over(moved, tensor.lower_bound)))
        total = f"{_size(self.bytes)} move, lower bound {_size(self.lower_bound)}: {_over(self.bytes, self.lower_bound)}"
        return "\n".join([*_columns(rows), total])


def plan(
    source: Iterable[TensorSpec],
    destination: Iterable[TensorSpec],
    *,
    wire: Mapping[str, str] | None = None,
    membership: str = "",
) -> Plan:
    """The plan that fills every tensor of the destination from the source's tensor of the same name.

    Every piece comes from exactly one process: the destination's own if it has it, else one of its host, else the one that
    has given least so far; ties go to the lower rank. `wire` names a dtype per tensor through which its values pass.
    Raises `MismatchError` (shapes, a tensor that is missing, no cast), `NotCovered` with the first missing box.
    """
    sources = _by_name(source, "source")
    destinations = _by_name(destination, "destination")
    wires = dict(wire or {})
    _check_names(sources, destinations, wires)
    patterns: dict[bytes, Overlaps] = {}
    loads = Loads()
    tensors: dict[str, TensorPlan] = {}
    for name, wanted in destinations.items():
        given = sources[name]
        wire_dtype = _checked_wire(given, wanted, wires.get(name))
        layouts = given.layout() + wanted.layout()
        if layouts not in patterns:
            patterns[layouts] = Overlaps(given, wanted)
        tensors[name] = TensorPlan(given, wanted, patterns[layouts], wire_dtype)
        size = itemsize(wire_dtype)
        for overlap in patterns[layouts].open:
            tensors[name].chosen += loads.choose(overlap, size)
    return Plan(tensors, key(sources.values(), destinations.values(), wires, membership))


def key(
    source: Iterable[TensorSpec],
    destination: Iterable[TensorSpec],
    wire: Mapping[str, str] | None = None,
    membership: str = "",
) -> str:
    """Equal for plans that would be equal: the specs with their owners and hosts, wire dtypes and the membership."""
    parts = [
        [spec.digest() for spec in source],
        [spec.digest() for spec in destination],
        sorted((wire or {}).items()),
        membership,
    ]
    return digest_of(parts).hex()


class Loads:
    """Bytes that each process gives and fetches so far: the next piece goes to the one with least."""

    def __init__(self) -> None:
        self._given: dict[int, int] = defaultdict(int)
        self._fetched: dict[int, int] = defaultdict(int)
        # Loads only grow, so an entry that is out of date is never too far down: it is put back when it comes up.
        self._heaps: dict[tuple[Place, ...], list[tuple[int, int, Place]]] = {}

    def choose(self, overlap: Overlap, size: int) -> list[Route]:
        """The routes of one overlap: one from a source, the others from the process that fetches."""
        volume = overlap.box.volume * size
        source = self._least(overlap.candidates)
        self._given[source[0]] += volume
        how = REMOTE if overlap.is_remote else HOST
        first = min(overlap.takers, key=lambda place: (self._fetched[place[0]], place))
        self._fetched[first[0]] += volume
        rest = [place for place in overlap.takers if place != first]
        return [
            Route(overlap.box, source, first, how),
            *(Route(overlap.box, first, place, SHARED) for place in rest),
        ]

    def _least(self, candidates: tuple[Place, ...]) -> Place:
        if len(candidates) == 1:
            return candidates[0]
        heap = self._heaps.get(candidates)
        if heap is None:
            heap = self._heaps[candidates] = [(self._given[p[0]], p[0], p) for p in candidates]
            heapq.heapify(heap)
        while heap[0][0] != self._given[heap[0][1]]:
            _, rank, place = heap[0]
            heapq.heapreplace(heap, (self._given[rank], rank, place))
        return heap[0][2]


def coalesce(copies: Sequence[Copy]) -> list[Copy]:
    """Copies whose neighbourhood holds in both memories as one: pages that lie behind each other become one pass."""
    groups: dict[tuple[object, ...], list[Copy]] = defaultdict(list)
    for copy in copies:
        place = (copy.tensor, copy.source_rank, copy.source_buffer, copy.source_strides)
        groups[*place, copy.buffer, copy.strides, copy.how].append(copy)
    return [joined for group in groups.values() for joined in _join_group(group)]


def _join_group(group: list[Copy]) -> list[Copy]:
    for dim in reversed(range(len(group[0].sizes))):
        if len(group) == 1:
            break
        group.sort(key=lambda copy: (copy.start, copy.source_start))
        found = [group[0]]
        for copy in group[1:]:
            last = found[-1]
            step = last.sizes[dim]
            is_next = (
                copy.start == last.start + step * last.strides[dim]
                and copy.source_start == last.source_start + step * last.source_strides[dim]
                and copy.sizes[:dim] == last.sizes[:dim]
                and copy.sizes[dim + 1 :] == last.sizes[dim + 1 :]
            )
            if is_next:
                sizes = (*last.sizes[:dim], step + copy.sizes[dim], *last.sizes[dim + 1 :])
                found[-1] = msgspec.structs.replace(last, sizes=sizes)
            else:
                found.append(copy)
        group = found
    return group


def _copy(
    name: str,
    route: Route,
    givers: Mapping[int, Sequence[Held]],
    takers: Mapping[int, Sequence[Held]],
) -> Copy:
    source = givers[route.source[0]][route.source[1]]
    target = takers[route.destination[0]][route.destination[1]]
    return Copy(
        name,
        route.box.sizes,
        route.source[0],
        source.buffer,
        source.at(route.box.offsets),
        source.strides,
        target.buffer,
        target.at(route.box.offsets),
        target.strides,
        route.how,
    )


def _by_name(specs: Iterable[TensorSpec], side: str) -> dict[str, TensorSpec]:
    found: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name in found:
            raise ConfigError(
                f"the {side} names {spec.name} twice", fix="give each tensor its own name"
            )
        found[spec.name] = spec
    return found


def _check_names(
    sources: Mapping[str, TensorSpec],
    destinations: Mapping[str, TensorSpec],
    wires: Mapping[str, str],
) -> None:
    missing = [name for name in destinations if name not in sources]
    if missing:
        raise MismatchError(
            f"the source has no tensor {missing[0]!r}"
            + (f" ({len(missing)} of {len(destinations)} are missing)" if len(missing) > 1 else ""),
            fix=f"the source has {', '.join(sorted(sources)[:5]) or 'nothing'}: use the same names on both sides",
        )
    unknown = sorted(set(wires) - set(destinations))
    if unknown:
        raise ConfigError(
            f"a wire dtype is given for {unknown[0]!r}, which is no tensor of the destination",
            fix="name tensors of the destination",
        )


def _checked_wire(given: TensorSpec, wanted: TensorSpec, wire: str | None) -> str:
    if given.shape != wanted.shape:
        raise MismatchError(
            f"{given.name}: the source has shape {given.shape}, the destination {wanted.shape}",
            fix="reshard between tensors of one global shape; reshape before or after",
        )
    for begin, end in ((given.dtype, wire or wanted.dtype), (wire or given.dtype, wanted.dtype)):
        if not can_cast(begin, end):
            raise MismatchError(
                f"{given.name}: no cast leads from {begin} to {end}",
                fix="use one dtype on both sides, two floating ones, or an integer that holds all values",
            )
    return wire or narrower(given.dtype, wanted.dtype)


def _over(moved: int, bound: int) -> str:
    return f"{moved / bound:.2f}" if bound else "nothing to move" if not moved else "inf"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
