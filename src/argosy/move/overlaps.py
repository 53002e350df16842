"""Which source boxes meet which destination boxes: found through sorted intervals, once per pair of layouts.

`plans` asks for the overlaps of a source and a destination and chooses among the candidates. Pure. The work is counted in
boxes looked at (`visited`), so that a test can hold it near the number of overlaps instead of sources times destinations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from argosy.errors import MismatchError
from argosy.move.boxes import Box, Owner, TensorSpec

Place = tuple[int, int]
"""(rank, number of the held box there)"""


class NotCovered(MismatchError):
    """The source lacks a part that the destination wants; `tensor` and `box` say which."""

    def __init__(self, tensor: str, box: Box) -> None:
        super().__init__(
            f"{tensor}: no source process holds the part {box} that the destination wants",
            fix="give the states of all source ranks, or narrow the destination",
        )
        self.tensor = tensor
        self.box = box


RESIDENT, HOST, REMOTE, SHARED = "resident", "host", "remote", "shared"


class Route(msgspec.Struct, frozen=True, array_like=True):
    """One piece of one tensor: from whose held box to whose, and how.

    `resident`: the process has it already and copies inside itself. `host`: read from another process of the host.
    `remote`: comes from another host. `shared`: a copy of what another process of the host fetches in this plan.
    """

    box: Box
    source: Place
    destination: Place
    how: str


class Overlap(msgspec.Struct, frozen=True, array_like=True):
    """A piece that `takers` want and any one of `candidates` can give.

    Several takers are processes of one host that want the same piece from another host: one fetches, the rest copy from it.
    """

    box: Box
    candidates: tuple[Place, ...]
    takers: tuple[Place, ...]
    is_remote: bool = False


class Overlaps:
    """All overlaps of one pair of layouts: routes that are `settled` (one candidate), and `open` ones with a choice.

    `settled` has them by destination rank, `readers` the ranks that read from each, `volumes` elements by way.
    """

    def __init__(self, source: TensorSpec, destination: TensorSpec) -> None:
        self.settled: dict[int, list[Route]] = defaultdict(list)
        self.readers: dict[int, set[int]] = defaultdict(set)
        self.volumes: dict[str, int] = defaultdict(int)
        self.open: list[Overlap] = []
        self.wanted_volume = 0
        self._groups = _replicas(source.owners)
        self._index = BoxIndex(self._groups)
        self._is_disjoint = self._index.is_disjoint()
        self._hosts = {owner.rank: owner.host for owner in source.owners}
        self._remote: dict[tuple[str, Box, int], list[Place]] = {}
        for owner in destination.owners:
            for number, held in enumerate(owner.held):
                self._add(source.name, held.box, owner, number)
        for (_, box, group), takers in self._remote.items():
            candidates = self._groups[self._index.boxes[group]]
            self._keep(Overlap(box, _one_per_rank(candidates), tuple(takers), True))

    @property
    def visited(self) -> int:
        """Boxes looked at so far: the measure of work."""
        return self._index.visited

    def _add(self, name: str, wanted: Box, owner: Owner, number: int) -> None:
        self.wanted_volume += wanted.volume
        for piece, group in self._pieces(name, wanted, owner):
            candidates = self._groups[self._index.boxes[group]]
            mine = [place for place in candidates if place[0] == owner.rank]
            near = [place for place in candidates if self._hosts[place[0]] == owner.host]
            if mine:
                self._settle(Route(piece, mine[0], (owner.rank, number), RESIDENT))
            elif near:
                self._keep(Overlap(piece, _one_per_rank(near), ((owner.rank, number),)))
            else:
                takers = self._remote.setdefault((owner.host, piece, group), [])
                takers.append((owner.rank, number))

    def _keep(self, overlap: Overlap) -> None:
        if len(overlap.candidates) > 1 or len(overlap.takers) > 1:
            self.open.append(overlap)
            return
        how = REMOTE if overlap.is_remote else HOST
        self._settle(Route(overlap.box, overlap.candidates[0], overlap.takers[0], how))

    def _settle(self, route: Route) -> None:
        self.settled[route.destination[0]].append(route)
        self.volumes[route.how] += route.box.volume
        if route.how != RESIDENT:
            self.readers[route.source[0]].add(route.destination[0])

    def _pieces(self, name: str, wanted: Box, owner: Owner) -> list[tuple[Box, int]]:
        """The wanted box cut into pieces, each within one group of replicas; every element in exactly one piece."""
        hits = self._index.query(wanted)
        if self._is_disjoint and sum(box.volume for box, _ in hits) == wanted.volume:
            return hits
        # Sources overlap each other without being equal (or something is missing): the nearest first, then what they leave.
        hits.sort(key=lambda hit: (self._distance(hit[1], owner), -hit[0].volume, hit[1]))
        found, rest = [], [wanted]
        for box, group in hits:
            left: list[Box] = []
            for part in rest:
                cut = part.intersect(box)
                if cut is None:
                    left.append(part)
                else:
                    found.append((cut, group))
                    left += part.subtract(cut)
            rest = left
        if rest:
            raise NotCovered(name, min(rest, key=lambda box: box.offsets))
        return found

    def _distance(self, group: int, owner: Owner) -> int:
        places = self._groups[self._index.boxes[group]]
        if any(rank == owner.rank for rank, _ in places):
            return 0
        return 1 if any(self._hosts[rank] == owner.host for rank, _ in places) else 2


def _replicas(owners: Iterable[Owner]) -> dict[Box, list[Place]]:
    """Equal boxes of different owners are one box with several places."""
    groups: dict[Box, list[Place]] = defaultdict(list)
    for owner in owners:
        for number, held in enumerate(owner.held):
            groups[held.box].append((owner.rank, number))
    return groups


def _one_per_rank(places: Iterable[Place]) -> tuple[Place, ...]:
    first: dict[int, Place] = {}
    for place in places:
        first.setdefault(place[0], place)
    return tuple(first.values())


class BoxIndex:
    """Boxes by sorted intervals, one dim after the other: a query looks at little more than it finds."""

    def __init__(self, boxes: Iterable[Box]) -> None:
        self.boxes = list(boxes)
        self.visited = 0
        self._root = _Level(range(len(self.boxes)), self.boxes, 0) if self.boxes else None

    def query(self, wanted: Box) -> list[tuple[Box, int]]:
        """(common part, number of the box) for every box that meets the wanted one, in order of the boxes' offsets."""
        numbers: list[int] = []
        if self._root is not None:
            self.visited += self._root.collect(wanted, numbers)
        found = []
        for number in numbers:
            common = wanted.intersect(self.boxes[number])
            if common is not None:
                found.append((common, number))
        return found

    def is_disjoint(self) -> bool:
        """Whether no two boxes meet."""
        return all(len(self.query(box)) == 1 for box in self.boxes)


class _Level:
    """The intervals of one dim, sorted by start; each leads to the boxes that have it, by their next dim."""

    def __init__(self, numbers: Iterable[int], boxes: Sequence[Box], dim: int) -> None:
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        if not boxes[0].sizes:
            groups[0, 1] = list(numbers)
        else:
            for number in numbers:
                box = boxes[number]
                groups[box.offsets[dim], box.offsets[dim] + box.sizes[dim]].append(number)
        intervals = sorted(groups)
        self._dim = dim
        self._starts = [begin for begin, _ in intervals]
        self._stops = [end for _, end in intervals]
        # The largest stop so far never falls, so it can be searched: nothing before that place reaches the query.
        self._reach: list[int] = []
        for stop in self._stops:
            self._reach.append(max(stop, self._reach[-1]) if self._reach else stop)
        is_last = dim + 1 >= len(boxes[0].sizes)
        self._found = [groups[interval] for interval in intervals] if is_last else []
        self._next = [] if is_last else [_Level(groups[i], boxes, dim + 1) for i in intervals]

    def collect(self, wanted: Box, into: list[int]) -> int:
        """Add the numbers of the boxes that meet the wanted one; return how many intervals were looked at."""
        low, high = 0, 1
        if wanted.sizes:
            low = wanted.offsets[self._dim]
            high = low + wanted.sizes[self._dim]
        first, last = bisect_right(self._reach, low), bisect_left(self._starts, high)
        visited = 1 + max(0, last - first)
        for place in range(first, last):
            if self._stops[place] <= low:
                continue
            if self._next:
                visited += self._next[place].collect(wanted, into)
            else:
                into += self._found[place]
        return visited
