"""Which steps a holder lets go: those that newer whole ones have made useless, and, when there is no room, those that are missed least.

A step is whole when all that this host is to keep of it has come. The newest whole one of a run that somebody uses never goes for another; all of a
run that nobody uses any more may. Pure; called by the shelves.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

Series = tuple[str, tuple[str, ...]]
"""A run and the members whose parts are kept together."""
MOST_PARTIAL = 4
"""Steps that wait for slower members; one that is further behind has lost them."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A step of some members in a holder's memory."""

    step: int
    is_whole: bool


def plan_surplus(standing: list[Standing], keep: int) -> list[int]:
    """Steps that go by themselves: whole ones but the newest `keep`, what was not whole before a newer one was, and the oldest of many that are not."""
    whole = sorted((one.step for one in standing if one.is_whole), reverse=True)
    partial = sorted((one.step for one in standing if not one.is_whole), reverse=True)
    newest = whole[0] if whole else -1
    useless = [
        step for number, step in enumerate(partial) if step < newest or number >= MOST_PARTIAL
    ]
    return sorted([*whole[keep:], *useless])


def plan_shedding(standing: list[Standing], coming: int) -> list[int]:
    """Steps that may go for one that is coming, in the order in which they go."""
    whole = sorted(one.step for one in standing if one.is_whole and one.step != coming)
    partial = sorted(one.step for one in standing if not one.is_whole and one.step < coming)
    return [*partial, *whole[:-1]]


def plan_yielding(
    others: Mapping[Series, list[Standing]], used: Container[str]
) -> list[tuple[Series, int]]:
    """Steps of other series that may go when that is not enough, in the order in which they go; `others` has the one that was put least recently first.

    Runs that nobody uses go one after another, each with its oldest steps first; then what the newest whole steps of used ones have made useless.
    """
    put_last = {run: number for number, (run, _) in enumerate(others)}
    over = [
        (series, one.step) for series in others if series[0] not in used for one in others[series]
    ]
    over.sort(key=lambda one: (put_last[one[0][0]], one[1]))
    surplus = [
        (series, step)
        for series in others
        if series[0] in used
        for step in plan_surplus(others[series], keep=1)
    ]
    return [*over, *surplus]
