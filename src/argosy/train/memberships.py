"""Memberships of a training run: a generation, or an interim of it in which some of its members have ended. Pure.

Everybody forms them for himself from what he sees, and all come to the same: ends are seen in one order, so equally many ended are the same ones. Used by
crew.py, which sees and waits, and by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import msgspec

Place = tuple[int, int, int]
"""A generation, a rank of it, and the process that has enlisted as it."""
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


def late_veterans(last_places: Iterable[Place], generation: int) -> dict[int, int]:
    """Of those that live, where each has enlisted last: who is not ready for this generation nor a newer one, by that rank.

    Such a process would be, as soon as it is told: one that stays away is stopped. Nobody else may be left who waits for it.
    """
    return {rank: process for number, rank, process in sorted(last_places) if number < generation}


def is_foremost(first_places: Collection[Place], own: Place) -> bool:
    """Whether a process has come before all others that live, by where each has enlisted first; it may not have enlisted yet."""
    mine = min((place for place in first_places if place[2] == own[2]), default=own)
    return all(place >= mine for place in first_places)
