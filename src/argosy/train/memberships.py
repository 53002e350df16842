"""Memberships of a training run: a generation, or an interim of it in which some of its members have ended. Pure.

Everybody forms them for himself from what he sees, and all come to the same: ends are seen in one order, so equally many ended are the same ones. Used by
crew.py, which sees and waits, and by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

INTERIMS = 4096
"""Interims a generation may have: one for each member that can end."""


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """Who trains together."""

    number: int
    """Grows with every generation and with every end in it."""
    members: tuple[int, ...]
    """Ranks of the generation that have not ended."""
    is_interim: bool
    """Whether some have: their lanes are dealt to the others."""


def form(generation: int, world_size: int, ended: Collection[int]) -> Membership:
    """The membership of a generation when these of its ranks have ended."""
    return Membership(
        number=generation * INTERIMS + len(ended),
        members=tuple(rank for rank in range(world_size) if rank not in ended),
        is_interim=bool(ended),
    )


def is_complete(
    world_size: int, has_enlisted: Callable[[int], bool], gone: Collection[int]
) -> bool:
    """Whether a generation may be taken: all its ranks are ready for it, but for those that have ended before they were."""
    return all(has_enlisted(rank) or rank in gone for rank in range(world_size))


def late_veterans(rows: Iterable[tuple[int, int, int]], generation: int) -> dict[int, int]:
    """Of (generation, rank, process) that have ever enlisted: who has trained before and is not ready for this generation, by the rank that it had last.

    Such a process would be, as soon as it is told: one that stays away is stopped. Nobody else may be left who waits for it.
    """
    known = sorted(rows)
    ready = {process for number, _, process in known if number == generation}
    return {
        rank: process
        for number, rank, process in known
        if number < generation and process not in ready
    }
