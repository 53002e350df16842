"""Who computes which lanes and who updates which parameters: functions of the members alone.

Every rank computes them for itself and nobody sends them. Nothing of a step's result depends on them: lanes are added by the tree, and a parameter's update
is the same wherever it is made. Used by transaction.py, evaluation.py and the simulator. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def lanes_of(position: int, count: int, num_lanes: int) -> range:
    """Contiguous lanes for one of `count` members: siblings stay together, so that they share a slot."""
    return range(num_lanes * position // count, num_lanes * (position + 1) // count)


def dealt_lanes(position: int, count: int, num_lanes: int) -> range:
    """Every `count`-th lane: what one lost member has not finished is spread over all that are left."""
    return range(position, num_lanes, count)


def runs_of(
    position: int, count: int, num_lanes: int, *, is_interim: bool, attempt: int = 0
) -> list[tuple[int, int]]:
    """(first, count) of the lanes of one of `count` members; a step that is computed again is dealt to others."""
    position = (position + attempt) % count
    if is_interim:
        return [(lane, 1) for lane in dealt_lanes(position, count, num_lanes)]
    mine = lanes_of(position, count, num_lanes)
    return [(mine.start, len(mine))] if mine else []


def owners_of_lanes(
    members: Sequence[int], num_lanes: int, *, is_interim: bool, attempt: int = 0
) -> list[int]:
    """The rank that is to compute each lane, as `runs_of` deals them."""
    owners = [members[0]] * num_lanes
    for position, rank in enumerate(members):
        mine = runs_of(position, len(members), num_lanes, is_interim=is_interim, attempt=attempt)
        for first, count in mine:
            owners[first : first + count] = [rank] * count
    return owners


def lane_to_take(position: int, count: int, num_lanes: int, taken: Collection[int]) -> int | None:
    """Of an evaluation, in which each member takes what nobody has: the next lane, from its own part on; None when there is none."""
    first = num_lanes * position // count
    order = ((first + place) % num_lanes for place in range(num_lanes))
    return next((lane for lane in order if lane not in taken), None)


def parameters_of(position: int, count: int, costs: Mapping[str, int]) -> list[str]:
    """Whole parameters for one of `count` members: the largest first, each to whom has least; in the order of `costs`."""
    loads = [0] * count
    mine: set[str] = set()
    order = {name: place for place, name in enumerate(costs)}
    for name in sorted(costs, key=lambda each: (-costs[each], order[each])):
        least = min(range(count), key=lambda each: (loads[each], each))
        loads[least] += costs[name]
        if least == position:
            mine.add(name)
    return [name for name in costs if name in mine]
