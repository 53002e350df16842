"""Which processes take part in a turn of a replicated trainer, and how far each of them has read: a small table in shared memory.

Private weights change in the middle of a step, so whoever joins waits for its end. The first process that begins a turn writes down all that it knows; that list counts for everybody.
If nobody of it is alive any more, the step is begun anew with another list: what the dead have finished has the same bits. Used by replicated.py; decides nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from argosy.errors import ConfigError
from argosy.move import arenas
from argosy.move.words import Memory

_LINE = 64
_PLACES = 4
"""Lists of one writer that may be read at a time."""
_RANK_BITS, _EPOCH_BITS, _CALL_BITS, _PID_BITS = 12, 12, 8, 22
MOST_CALLS = (1 << _CALL_BITS) - 1


class Participants:
    """One process's view of the table."""

    def __init__(self, arena_name: str, *, most_ranks: int) -> None:
        self._most_ranks = most_ranks
        self._marks_at = _LINE
        self._lists_at = self._marks_at + most_ranks * _LINE
        total = self._lists_at + most_ranks * _PLACES * (most_ranks + 1) * 8
        self._arena = arenas.create(arena_name, total, scope="run", prefault=False)
        if self._arena.find("participants") is None:
            try:
                self._arena.empty((total,), torch.uint8, name="participants")
            except ConfigError:
                pass  # another process was first
        self._memory = Memory(self._arena.tensor("participants"), self._arena.fileno())

    def agree(self, turn: int, rank: int, living: Collection[int]) -> list[int] | None:
        """The process ids of those that take part in a turn; `living` are all members as this process knows them. None: the turn is past."""
        while True:
            seen = self._memory.load(0)
            known = (seen >> (_RANK_BITS + _EPOCH_BITS)) - 1
            epoch = 0
            if known > turn:
                return None
            if known == turn:
                epoch = seen >> _RANK_BITS & ((1 << _EPOCH_BITS) - 1)
                found = self._read(turn, epoch, seen & ((1 << _RANK_BITS) - 1))
                if self._memory.load(0) != seen:
                    continue
                if not set(living).isdisjoint(found):
                    return found
                epoch += 1
            self._write(turn, epoch, rank, living)
            word = ((turn + 1) << _EPOCH_BITS | epoch) << _RANK_BITS | rank
            self._memory.swap(0, seen, word)

    def mark(self, rank: int, turn: int, call: int) -> None:
        """This process has all that it needs of the blocks of a call of a turn."""
        word = (turn << _CALL_BITS | call) << _PID_BITS | os.getpid()
        self._memory.store(self._marks_at + rank * _LINE, word)

    def has_marked(self, rank: int, pid: int, turn: int, call: int) -> bool:
        """Whether that process has, or is further."""
        word = self._memory.load(self._marks_at + rank * _LINE)
        is_of = word & ((1 << _PID_BITS) - 1) == pid
        return is_of and word >> _PID_BITS >= turn << _CALL_BITS | call

    def _write(self, turn: int, epoch: int, rank: int, pids: Collection[int]) -> None:
        at = self._list_at(turn, epoch, rank)
        self._memory.store(at, len(pids))
        for place, pid in enumerate(pids):
            self._memory.store(at + 8 * (place + 1), pid)

    def _read(self, turn: int, epoch: int, rank: int) -> list[int]:
        at = self._list_at(turn, epoch, rank)
        count = min(self._memory.load(at), self._most_ranks)
        return [self._memory.load(at + 8 * (place + 1)) for place in range(count)]

    def _list_at(self, turn: int, epoch: int, rank: int) -> int:
        # One that follows another in the same turn, or in the next one, has another place.
        place = rank * _PLACES + (turn + epoch) % _PLACES
        return self._lists_at + place * (self._most_ranks + 1) * 8
