"""Interleaved turns of several sides, and what may be said about their ratio.

Sides take turns in one order and then in the reverse one, so that each is as often first as last and the first side's turns of two rounds are
neighbours: they give the row of a side against itself, whose interval says how much of a ratio is the machine's noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import rounded, say

Side = Callable[[], float]


def interleave(sides: dict[str, Side], rounds: int, *, label: str) -> dict[str, list[float]]:
    """Seconds of every turn; one warm-up round is not counted."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        sides[name]()
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            times[name].append(sides[name]())
        if (number + 1) % max(1, rounds // 5) == 0:
            medians = ", ".join(f"{n} {1000 * statistics.median(t):.1f}" for n, t in times.items())
            say(f"{label}: round {number + 1}/{rounds}: ms {medians}")
    return times


def speed(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Our speed over theirs (above 1: we are quicker): the median of the pairs and its 95 % interval."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    low, high = interval(ratios)
    return {
        "ratio": rounded(statistics.median(ratios)),
        "interval": [rounded(low), rounded(high)],
        "pairs": len(ratios),
    }


def against_itself(times: Sequence[float]) -> dict[str, Any]:
    """The same for neighbouring turns of one side, the first of each round's order."""
    first, second = times[1:-1:2], times[2::2]
    return speed(first, second)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median by order statistics: no distribution is supposed."""
    ordered, count = sorted(values), len(values)
    below = 0.0
    rank = 0
    while rank < count // 2:
        below += math.comb(count, rank) / 2**count
        if below > 0.025:
            break
        rank += 1
    lowest = max(0, rank - 1)
    return ordered[lowest], ordered[count - 1 - lowest]
