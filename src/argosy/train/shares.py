"""Who computes which lanes and who updates which parameters: functions of the members alone.

Every rank computes them for itself and nobody sends them. Nothing of a step's result depends on them: lanes are added by the tree, and a parameter's update
is the same wherever it is made. Used by crew.py and transaction.py. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def lanes_of(position: int, count: int, num_lanes: int) -> range:
    """Contiguous lanes for one of `count` members: siblings stay together, so that they share a slot."""
    return range(num_lanes * position // count, num_lanes * (position + 1) // count)


def dealt_lanes(position: int, count: int, num_lanes: int) -> range:
    """Every `count`-th lane: what one lost member has not finished is spread over all that are left."""
    return range(position, num_lanes, count)


def owners_of_lanes(members: Sequence[int], num_lanes: int, *, is_interim: bool) -> list[int]:
    """The rank that is to compute each lane."""
    owners = [members[0]] * num_lanes
    deal = dealt_lanes if is_interim else lanes_of
    for position, rank in enumerate(members):
        for lane in deal(position, len(members), num_lanes):
            owners[lane] = rank
    return owners


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
