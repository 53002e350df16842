"""Rank sets as people read them: `0-3,7`.

Used wherever several like processes are named in one breath (logs, stacks, causes). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable


def format_ranks(ranks: Iterable[int]) -> str:
    """`{0, 1, 2, 5}` as `0-2,5`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranks(text: str) -> list[int]:
    """`0-2,5` as `[0, 1, 2, 5]`; ValueError when it is no rank set."""
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is not a rank or a range of ranks")
        start, end = int(first), int(last) if dash else int(first)
        if end < start:
            raise ValueError(f"{part!r} runs backwards")
        ranks.update(range(start, end + 1))
    return sorted(ranks)
