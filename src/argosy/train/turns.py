"""What the state of user code was when each turn of its loop began: for those who join the loop there, and for a save.

A step commits the state as it was in its middle; what a loop does after a commit belongs to the next turn. Whoever is first to begin a turn offers the state here. One who joins takes it, and while
there is none but somebody knows it, waits; if nobody does, what was committed has to do. Two turns are kept: nobody is further behind. Used by parts.py; decides nothing.
"""

from __future__ import annotations

import os

import torch

from argosy.errors import ConfigError
from argosy.move import arenas
from argosy.move.words import Memory
from argosy.train.seeds import mix

MOST_BYTES = 64 << 10
_LINE = 64
_ROOM = MOST_BYTES + _LINE
_RANK_BITS = 16
_PID_BITS = 22


class Turns:
    """One process's view of the last two turns."""

    def __init__(self, arena_name: str, *, most_ranks: int) -> None:
        self._asked_at = 2 * _LINE
        self._bodies_at = self._asked_at + most_ranks * _LINE
        total = self._bodies_at + 2 * most_ranks * _ROOM
        self._arena = arenas.create(arena_name, total, scope="run", prefault=False)
        if self._arena.find("turns") is None:
            try:
                self._arena.empty((total,), torch.uint8, name="turns")
            except ConfigError:
                pass  # another process was first
        region = self._arena.tensor("turns")
        self._bytes = region.numpy()
        self._memory = Memory(region, self._arena.fileno())

    def offer(self, turn: int, rank: int, body: bytes) -> None:
        """The state with which a turn begins; the first one counts."""
        if len(body) > MOST_BYTES:
            raise ConfigError(f"a state of {len(body)} bytes", fix=f"keep it below {MOST_BYTES}")
        at, tag = turn % 2 * _LINE, _tag(turn)
        seen = self._memory.load(at)
        if seen >> _RANK_BITS == tag:
            return
        place = self._body_at(turn, rank)
        packed = len(body).to_bytes(8, "little") + body
        self._bytes[place : place + len(packed)] = memoryview(packed)
        self._memory.swap(at, seen, tag << _RANK_BITS | rank)

    def find(self, turn: int) -> bytes | None:
        """The state that was offered for a turn."""
        seen = self._memory.load(turn % 2 * _LINE)
        if seen >> _RANK_BITS != _tag(turn):
            return None
        place = self._body_at(turn, seen & ((1 << _RANK_BITS) - 1))
        length = int.from_bytes(self._bytes[place : place + 8].tobytes(), "little")
        return bytes(self._bytes[place + 8 : place + 8 + length].tobytes())

    def ask(self, turn: int, rank: int) -> bool:
        """Say that this process does not know the state of a turn; False when it has been said."""
        word = (turn + 1) << _PID_BITS | os.getpid()
        if self._memory.load(self._asked_at + rank * _LINE) == word:
            return False
        self._memory.store(self._asked_at + rank * _LINE, word)
        return True

    def asks(self, turn: int, rank: int, pid: int) -> bool:
        """Whether that process has said so."""
        word = (turn + 1) << _PID_BITS | pid
        return self._memory.load(self._asked_at + rank * _LINE) == word

    def _body_at(self, turn: int, rank: int) -> int:
        return self._bodies_at + (2 * rank + turn % 2) * _ROOM


def _tag(turn: int) -> int:
    return mix(turn) >> _RANK_BITS | 1
