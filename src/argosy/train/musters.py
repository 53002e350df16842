"""Who has enlisted for which generation, in words that all processes of a run share.

A table for each of the last generations has a word per rank: who is ready for it. Tables are used again; a process that lives is not forgotten with them: it has a record of its own, with the places for which it
has enlisted first and last, until it has ended. Used by roster.py on shared memory and by the simulator on plain numbers. Pure: whether a process lives is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from argosy.errors import ConfigError, InvariantError
from argosy.train.memberships import Place

_TABLES = 4
_RECORDS = 2
"""For each rank: whoever leaves a generation is reaped before the next one begins, so that half of them are free."""
_LINE = 64
_FIRST, _LAST = 8, 16
"""Words of a record; before them that of its process, which is claimed."""
PID_BITS = 22
_PID_MASK = (1 << PID_BITS) - 1
_RANK_BITS = 16


class Words(Protocol):
    """Shared words by byte offset; `move.words.Memory`."""

    def load(self, offset: int) -> int:
        """A word."""

    def swap(self, offset: int, expected: int, desired: int) -> bool:
        """Compare-and-swap; whether it was done."""


def room(most_ranks: int) -> int:
    """Bytes that a muster takes."""
    return (_TABLES + _RECORDS) * most_ranks * _LINE


class Muster:
    """One process's view of it."""

    def __init__(
        self, words: Words, offset: int, most_ranks: int, start_of: Callable[[int], int]
    ) -> None:
        """`start_of` tells when a process began, 0 when there is none: with the id it names a process for good."""
        self._words = words
        self._offset = offset
        self._most_ranks = most_ranks
        self._start_of = start_of
        first = offset + _TABLES * most_ranks * _LINE
        self._records = range(first, offset + room(most_ranks), _LINE)

    def enlist(self, generation: int, rank: int, pid: int) -> None:
        """This process is ready to take part in a generation. One that comes late does not hide who has its rank in a newer one."""
        at, ready = self._row(generation, rank), (generation + 1) << PID_BITS | pid
        place = (generation + 1) << _RANK_BITS + PID_BITS | rank << PID_BITS | pid
        # The record first: nobody may find a process that none tells of.
        self._raise_to(self._claimed(pid, place) + _LAST, place)
        while (seen := self._words.load(at)) >> PID_BITS <= generation + 1:
            if self._words.swap(at, seen, ready):
                return

    def pid_of(self, generation: int, rank: int) -> int:
        """Who has enlisted as that rank, whether it lives or not; 0: nobody, or the generation is long past."""
        word = self._words.load(self._row(generation, rank))
        return word & _PID_MASK if word >> PID_BITS == generation + 1 else 0

    def process_of(self, generation: int, rank: int) -> tuple[int, int] | None:
        """(process id, start time) of who has enlisted as that rank; no start time when it has ended and another one has its record or its id."""
        pid = self.pid_of(generation, rank)
        for at in self._records if pid else ():
            who = self._words.load(at)
            if (
                who & _PID_MASK == pid
                and _generation_of(self._words.load(at + _FIRST)) <= generation
            ):
                return pid, who >> PID_BITS
        return (pid, 0) if pid else None

    def first_places(self) -> list[Place]:
        """Where each process that lives has enlisted first."""
        return self._places(_FIRST)

    def last_places(self) -> list[Place]:
        """Where each process that lives has enlisted last."""
        return self._places(_LAST)

    def _places(self, word: int) -> list[Place]:
        found = []
        for at in self._records:
            who, place = self._words.load(at), self._words.load(at + word)
            # One that has claimed the record a moment ago may not have written its place yet.
            if who and place & _PID_MASK == who & _PID_MASK and self._lives(who):
                rank = place >> PID_BITS & ((1 << _RANK_BITS) - 1)
                found.append((_generation_of(place), rank, place & _PID_MASK))
        return found

    def _claimed(self, pid: int, place: int) -> int:
        """The record of this process: the one that it has, or that of a process which has ended."""
        own = self._start_of(pid) << PID_BITS | pid
        for at in self._records:
            if self._words.load(at) == own:
                return at
        # That of an earlier process with the same id rather than any other: an id has one record.
        for at in sorted(self._records, key=lambda at: self._words.load(at) & _PID_MASK != pid):
            seen = self._words.load(at)
            if (not seen or not self._lives(seen)) and self._words.swap(at, seen, own):
                for word in (_FIRST, _LAST):
                    self._words.swap(at + word, self._words.load(at + word), place)
                return at
        raise InvariantError(f"{len(self._records)} processes live that have enlisted for a place")

    def _lives(self, who: int) -> bool:
        return self._start_of(who & _PID_MASK) == who >> PID_BITS

    def _raise_to(self, at: int, word: int) -> None:
        while (seen := self._words.load(at)) < word:
            self._words.swap(at, seen, word)

    def _row(self, generation: int, rank: int) -> int:
        if rank >= self._most_ranks:
            raise ConfigError(
                f"rank {rank} of at most {self._most_ranks}",
                fix=f"use at most {self._most_ranks} ranks, or more lanes",
            )
        return self._offset + (generation % _TABLES * self._most_ranks + rank) * _LINE


def _generation_of(place: int) -> int:
    return (place >> _RANK_BITS + PID_BITS) - 1
