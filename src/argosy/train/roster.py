"""The roster: a small table in shared memory in which the processes of a host that train together find each other.

Who has enlisted for which generation (musters.py); the digests of the initial parameters; failures of lanes; which attempt of a step is under way; the wish to stop;
values agreed on. Each row is published by its last word. Used by crew.py and transaction.py; decides nothing.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from typing import Any

import numpy as np
import torch

from argosy.errors import ConfigError, MismatchError
from argosy.move import arenas
from argosy.move.words import Memory
from argosy.train.musters import PID_BITS as _PID_BITS
from argosy.train.musters import Muster, room
from argosy.train.seeds import mix

_FAILURES = 64
_AGREEMENTS = 38
_MOST_AGREEMENTS = 16
_VALUE_BYTES = 1024
_LINE = 64
_INITIAL, _AGAIN, _STOP = 0, _LINE, 2 * _LINE
_TITLE, _TAKEN_OVER, _GENERATION = 3 * _LINE, 4 * _LINE, 5 * _LINE
_FIRST = 6 * _LINE
EDIT, VERDICT, STOP = 16, 17, 18
"""Agreements of the trainer itself, beyond those of user code."""
_COUNT_MASK = (1 << 42) - 1
_MOST_DESCENDANTS = 64
_BEATS, _ADVANCES, _CROSSINGS = 8, 16, 24
_OUTSIDE, _DONE = 1, 3
"""Lowest bits of a count that grows when a process enters a step: it is between two steps, or its loop is over."""


class Roster:
    """One process's view of the table."""

    def __init__(
        self, arena_name: str, *, most_ranks: int, num_parameters: int, title: int
    ) -> None:
        self._most_ranks = most_ranks
        self._digests_at = _FIRST
        muster_at = _up(self._digests_at + 8 * num_parameters)
        self._failures_at = muster_at + room(most_ranks)
        self._winners_at = self._failures_at + _FAILURES * 16
        self._values_at = _up(self._winners_at + 8 * _AGREEMENTS)
        self._arrivals_at = self._values_at + most_ranks * _AGREEMENTS * _VALUE_BYTES
        total = self._arrivals_at + most_ranks * _LINE
        self._arena = arenas.create(arena_name, total, scope="run", prefault=False)
        if self._arena.find("roster") is None:
            try:
                self._arena.empty((total,), torch.uint8, name="roster")
            except ConfigError:
                pass  # another process was first
        region = self._arena.tensor("roster")
        if region.numel() != total:
            raise _another(arena_name)
        self._bytes = region.numpy()
        self._memory = Memory(region, self._arena.fileno())
        self.muster = Muster(self._memory, muster_at, most_ranks, start_time)
        self._lines = self._memory.numbers(self._arrivals_at, most_ranks * _LINE // 8)
        # A process that had this id before may have left signs: those of this one go on from there, and the greatest is the last.
        counts = (self._signs(word, os.getpid()) for word in (_BEATS, _ADVANCES, _CROSSINGS))
        self._beats, self._advances, crossings = counts
        self._crossings = (crossings + _DONE) & ~_DONE
        self._digests = self._memory.numbers(self._digests_at, num_parameters)
        if not self._memory.swap(_TITLE, 0, title) and self._memory.load(_TITLE) != title:
            raise _another(arena_name)

    # --- who is there -------------------------------------------------------------------------

    def enlist(self, generation: int, rank: int) -> None:
        """This process is ready to take part in a generation."""
        self.muster.enlist(generation, rank, os.getpid())

    def process_of(self, generation: int, rank: int) -> tuple[int, int] | None:
        """(process id, start time) of a rank that has enlisted; one that has ended may have the start time 0."""
        return self.muster.process_of(generation, rank)

    def has_enlisted(self, generation: int, rank: int) -> bool:
        """Whether a rank has."""
        return self.muster.pid_of(generation, rank) != 0

    # --- the beginning ------------------------------------------------------------------------

    def first_generation(self, generation: int) -> int:
        """The generation that the run began in: that of whoever asks first."""
        self._memory.swap(_GENERATION, 0, generation + 1)
        return self._memory.load(_GENERATION) - 1

    def begin(self, digests: list[int]) -> bool:
        """Offer the digests of this process's initial parameters; False when others have begun, with `initial()`."""
        if self._memory.load(_INITIAL):
            return False
        self._digests[:] = np.asarray(digests, dtype=np.uint64)
        return self._memory.swap(_INITIAL, 0, mix(*digests) | 1)

    def initial(self) -> list[int] | None:
        """The digests that the run began with."""
        if not self._memory.load(_INITIAL):
            return None
        found: list[int] = self._digests.tolist()
        return found

    # --- steps --------------------------------------------------------------------------------

    def attempt_of(self, version: int) -> int:
        """How often the step from this version has been computed in vain."""
        word = self._memory.load(_AGAIN)
        return word & 0xFF if word >> 8 == version else 0

    def compute_again(self, version: int, attempt: int) -> None:
        """The step from this version is computed again; everybody who comes to this says the same."""
        seen = self._memory.load(_AGAIN)
        if (seen >> 8, seen & 0xFF) < (version, attempt):
            self._memory.swap(_AGAIN, seen, version << 8 | attempt)

    def count_taken_over(self, lanes: int) -> None:
        """Lanes of a step under way were computed by another rank than the one that it had begun with."""
        while lanes:
            seen = self._memory.load(_TAKEN_OVER)
            if self._memory.swap(_TAKEN_OVER, seen, seen + lanes):
                return

    @property
    def taken_over(self) -> int:
        """How many, in all the life of the run."""
        return self._memory.load(_TAKEN_OVER)

    def is_stopping(self, generation: int) -> bool:
        """Whether a member of this generation was asked to stop."""
        return self._memory.load(_STOP) == generation + 1

    def stop(self, generation: int) -> None:
        """All members of this generation are to stop at the committed version."""
        self._memory.store(_STOP, generation + 1)

    def note_failure(self, step: int, lane: int, text: str, attempt: str) -> bool:
        """Remember that a lane failed here; whether it has failed like that in another process before."""
        key = mix(step, lane, _hash(text)) | 1
        author = _hash(attempt) | 1
        for place in range(_FAILURES):
            at = self._failures_at + 16 * place
            seen = self._memory.load(at)
            if seen == key:
                return self._memory.load(at + 8) != author
            if not seen and self._memory.swap(at, 0, key):
                self._memory.store(at + 8, author)
                return False
        return False

    # --- meeting ------------------------------------------------------------------------------

    def arrive(self, rank: int, version: int) -> None:
        """This process has come to the edit of a version."""
        self._memory.store(
            self._arrivals_at + rank * _LINE, (version + 1) << _PID_BITS | os.getpid()
        )

    def has_arrived(self, rank: int, pid: int, version: int) -> bool:
        """Whether that process has, as that rank."""
        word = self._memory.load(self._arrivals_at + rank * _LINE)
        return word & ((1 << _PID_BITS) - 1) == pid and word >> _PID_BITS > version

    # --- signs of life ------------------------------------------------------------------------

    def beat(self, rank: int) -> None:
        """This process waits for others and looks up now and then: it is not hung."""
        self._beats += 1
        self._sign(rank, _BEATS, self._beats)

    def advance(self, rank: int) -> None:
        """This process has done a piece of work that is no step's: the others may have to wait for more of it."""
        self._advances += 1
        self._sign(rank, _ADVANCES, self._advances)

    def beats(self, pid: int) -> int:
        """How often that process has looked up; 0 if it has not."""
        return self._signs(_BEATS, pid)

    def advances(self, pid: int) -> int:
        """How many pieces of such work it has done."""
        return self._signs(_ADVANCES, pid)

    def leave_step(self, rank: int) -> None:
        """This process is in user code, between two steps or for a batch: it may take its time."""
        self._crossings |= _OUTSIDE
        self._sign(rank, _CROSSINGS, self._crossings)

    def enter_step(self, rank: int) -> None:
        """It is in a step again."""
        if self._crossings & _DONE:
            self._crossings = (self._crossings | _DONE) + 1
        self._sign(rank, _CROSSINGS, self._crossings)

    def leave_loop(self, rank: int) -> None:
        """The loop of this process is over, until it enters a step again."""
        self._crossings |= _DONE
        self._sign(rank, _CROSSINGS, self._crossings)

    def has_left_loop(self, pid: int) -> bool:
        """Whether that of another process is."""
        return self._signs(_CROSSINGS, pid) & _DONE == _DONE

    def is_outside(self, pid: int) -> bool:
        """Whether that process is in user code that may take its time."""
        return self._signs(_CROSSINGS, pid) & _OUTSIDE == _OUTSIDE

    def _sign(self, rank: int, word: int, count: int) -> None:
        at = self._arrivals_at + rank * _LINE + word
        self._memory.store(at, (count & _COUNT_MASK) << _PID_BITS | os.getpid())

    def _signs(self, word: int, pid: int) -> int:
        """The last sign of a process, whatever rank it has: it or who looks may not know yet that it has another."""
        mask = (1 << _PID_BITS) - 1
        places = np.flatnonzero(self._lines[word // 8 :: _LINE // 8] & np.uint64(mask) == pid)
        found = [self._memory.load(self._arrivals_at + int(p) * _LINE + word) for p in places]
        return max((sign >> _PID_BITS for sign in found if sign & mask == pid), default=0)

    # --- agreement ----------------------------------------------------------------------------

    def agree(self, turn: int, number: int, rank: int, value: Any) -> Any:
        """The value of whoever comes first to the `number`-th agreement of a step, which has the `turn`."""
        if number >= _MOST_AGREEMENTS:
            raise ConfigError(
                f"more than {_MOST_AGREEMENTS} calls of step.agree() in a step",
                fix="agree on one dictionary instead of many values",
            )
        return self.agree_on(turn, number, rank, value)

    def agree_on(self, turn: int, number: int, rank: int, value: Any) -> Any:
        """The same for EDIT and VERDICT too, whose turn is the version, and for STOP. Nobody is two turns behind."""
        place = (turn & 1) * (_AGREEMENTS // 2) + number
        tag = mix(turn, number) >> 16
        at = self._winners_at + 8 * place
        seen = self._memory.load(at)
        if seen >> 16 != tag:
            self._write(rank, place, value)
            self._memory.swap(at, seen, tag << 16 | rank)
            seen = self._memory.load(at)
        return self._read(seen & 0xFFFF, place)

    def _write(self, rank: int, place: int, value: Any) -> None:
        try:
            body = json.dumps(value).encode()
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"step.agree() was given {type(value).__name__}: {error}",
                fix="agree on numbers, texts, or lists and dictionaries of them: value.item(), not a tensor",
            )
        if len(body) > _VALUE_BYTES - 8:
            raise ConfigError(
                f"step.agree() was given {len(body)} bytes, there is room for {_VALUE_BYTES - 8}",
                fix="agree on a number or a short text",
            )
        at = self._value(rank, place)
        packed = len(body).to_bytes(8, "little") + body
        self._bytes[at : at + len(packed)] = memoryview(packed)

    def _read(self, rank: int, place: int) -> Any:
        at = self._value(rank, place)
        length = int.from_bytes(self._bytes[at : at + 8].tobytes(), "little")
        return json.loads(self._bytes[at + 8 : at + 8 + length].tobytes())

    def _value(self, rank: int, place: int) -> int:
        return self._values_at + (rank * _AGREEMENTS + place) * _VALUE_BYTES


def start_time(pid: int) -> int:
    """When a process began, in ticks since boot; 0 when there is none. With the id it names a process for good."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def activity(pid: int) -> tuple[str, int]:
    """(state letter, ticks of CPU used) of a process, with those of its descendants: it may wait for a compiler. An empty letter when there is none."""
    fields = _stat(pid)
    if not fields:
        return "", 0
    family = _descendants(pid) if fields[0] == "S" else []
    return fields[0], sum(_ticks(each) for each in (fields, *map(_stat, family)))


def _ticks(fields: list[str]) -> int:
    return int(fields[11]) + int(fields[12]) if fields else 0


def _descendants(pid: int) -> list[int]:
    """Living descendants, as far as the system tells; the nearest ones if there are very many."""
    found = [pid]
    for each in found:
        if len(found) > _MOST_DESCENDANTS:
            break
        for path in glob.iglob(f"/proc/{each}/task/*/children"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                found += map(int, file.read().split())
    return found[1:]


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _another(name: str) -> MismatchError:
    return MismatchError(
        f"arena {name!r} belongs to a trainer with another model, other lanes or another version of Argosy",
        fix="make one trainer per run with the same arguments on every rank",
    )


def _hash(text: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _up(value: int) -> int:
    return (value + _LINE - 1) // _LINE * _LINE
