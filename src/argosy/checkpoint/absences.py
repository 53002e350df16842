"""Which members of a group never will say what the others wait for: in an agreement those that have ended, in a save that is being written those that have ended before a writer process had
their part.

What a writer process was given is finished whatever happens to its rank, and waited for. A rank that was killed while it copied its snapshot is known by its process where it was of
this host; of other hosts, by the end of the one for which is waited here: launchers end all ranks when one ends. No torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from argosy.checkpoint import votes
from argosy.checkpoint.boards import Board, Group, PartnerLost
from argosy.checkpoint.lives import is_alive
from argosy.checkpoint.neighbours import this_host

_LIFE = "life"
_LOOK_SECONDS = 0.5
_SETTLE_SECONDS = 1.0
"""So long after its process has ended a member may be found to have handed its part over."""
_LEAVING_SECONDS = 60.0
"""So long others may copy after this one's rank has ended; a program that ends well does not end everywhere at once."""


class _Presence(msgspec.Struct, frozen=True):
    """Of what a member has said: where it is."""

    host: str = ""
    pid: int = 0


class _Presences:
    """Where members are, by what each has said under one key."""

    def __init__(self, board: Board, key: str) -> None:
        self._board = board
        self._key = key
        self._host = this_host()
        self._known: dict[int, _Presence] = {}

    def is_there(self, rank: int) -> bool | None:
        """Whether its process lives; None when that cannot be seen from here."""
        known = self._known.get(rank)
        if known is None:
            data = self._board.find(f"{self._key}-{rank:05d}")
            if data is None:
                return None
            known = self._known[rank] = msgspec.json.decode(data, type=_Presence)
        if not known.pid or not self._host or known.host != self._host:
            return None
        return is_alive(known.pid)


def announce(board: Board, rank: int) -> None:
    """Say where a member is, to all that will wait for it."""
    said = _Presence(this_host(), os.getpid())
    board.post(f"{_LIFE}-{rank:05d}", msgspec.json.encode(said))


class Departures:
    """Looked for by a member that waits for what the processes of others say themselves."""

    def __init__(self, board: Board) -> None:
        self._presences = _Presences(board, _LIFE)
        self._looked_at = 0.0
        self._ended_at: dict[int, float] = {}

    def check(self, missing: Sequence[int]) -> None:
        """PartnerLost when one of these has ended; what it had said before it did is not missing."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        for rank in missing:
            has_ended = self._presences.is_there(rank) is False
            if has_ended and now - self._ended_at.setdefault(rank, now) >= _SETTLE_SECONDS:
                raise PartnerLost(rank)


class Absences:
    """Looked for by one process of a save while it waits."""

    def __init__(self, board: Board, group: Group) -> None:
        self._board = board
        self._group = group
        self._presences = _Presences(board, votes.SAID)
        self._looked_at = 0.0
        self._left_at: float | None = None
        self._handed: set[int] = set()
        self._ended_at: dict[int, float] = {}

    def check(self, missing: Sequence[int]) -> None:
        """PartnerLost when one of these never will come."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        if self._left_at is None and self._group.has_left():
            self._left_at = now
        for rank in missing:
            if rank == self._group.rank or self._is_handed(rank):
                continue
            is_there = self._presences.is_there(rank)
            if is_there is None and not self._writes(rank):
                gone_at, most_seconds = self._left_at, _LEAVING_SECONDS
            elif is_there is not False:
                continue
            else:
                gone_at, most_seconds = self._ended_at.setdefault(rank, now), _SETTLE_SECONDS
            is_lost = gone_at is not None and now - gone_at >= most_seconds
            if is_lost and not self._is_being_committed():
                raise PartnerLost(rank)

    def _is_being_committed(self) -> bool:
        """What was said is taken down first of all, when everybody has voted."""
        return self._board.find(f"{votes.SAID}-{self._group.rank:05d}") is None

    def _is_handed(self, rank: int) -> bool:
        if rank in self._handed:
            return True
        if self._board.find(f"{votes.HANDED}-{rank:05d}") is None:
            return False
        self._handed.add(rank)
        return True

    def _writes(self, rank: int) -> bool:
        """Whether it writes its part itself: then it lives as long as the group waits, for all that is known here."""
        return self._board.find(f"{votes.WRITES}-{rank:05d}") is not None
