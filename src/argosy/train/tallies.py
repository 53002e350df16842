"""The tally: what lanes of an evaluation came to, in shared memory, with the ranks that are at work on the others.

Each rank writes records of its own alone, in a ring: a lane it has taken, how far it is, and at last the sums. They stay valid when it dies; whether somebody who has taken a lane still lives is for
the reader to know. The first total of an evaluation is the one that counts for all, so one who comes late reads it. Used by evaluation.py; decides nothing.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import torch

from argosy.errors import ConfigError
from argosy.move import arenas
from argosy.move.waits import fence
from argosy.move.words import Memory

_RECORD_BYTES = 1024
_KEY, _SEAL, _LANE, _PID, _PROGRESS, _LENGTH, _BODY = range(0, 56, 8)
_TOTALS = 64
_RANK_BITS = 16


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One lane of an evaluation, as somebody has written it."""

    lane: int
    pid: int
    progress: int
    value: Any = None
    """None while it is computed."""


class Tally:
    """One process's view of the records."""

    def __init__(self, arena_name: str, *, most_ranks: int, num_lanes: int) -> None:
        self._ring = 4 * num_lanes + 16
        self._most_ranks = most_ranks
        self._values_at = most_ranks * self._ring * _RECORD_BYTES
        self._winners_at = self._values_at + most_ranks * _TOTALS * _RECORD_BYTES
        total = self._winners_at + 8 * _TOTALS
        self._arena = arenas.create(arena_name, total, scope="run", prefault=False)
        if self._arena.find("tally") is None:
            try:
                self._arena.empty((total,), torch.uint8, name="tally")
            except ConfigError:
                pass  # another process was first
        region = self._arena.tensor("tally")
        self._bytes = region.numpy()
        self._memory = Memory(region, self._arena.fileno())
        words = self._memory.numbers(0, self._values_at // 8)
        self._keys = words.reshape(-1, _RECORD_BYTES // 8)[:, _KEY // 8]
        self._next = 0

    # --- lanes --------------------------------------------------------------------------------

    def take(self, rank: int, key: int, lane: int, pid: int) -> int:
        """Say that this rank computes a lane; the number of the record."""
        record = rank * self._ring + self._next % self._ring
        self._next += 1
        at = record * _RECORD_BYTES
        self._memory.store(at + _KEY, 0)
        fence()
        for word, value in ((_SEAL, 0), (_LANE, lane), (_PID, pid), (_PROGRESS, 0)):
            self._memory.store(at + word, value)
        self._memory.store(at + _KEY, key)
        return record

    def advance(self, record: int, progress: int) -> None:
        """Say how far it is."""
        self._memory.store(record * _RECORD_BYTES + _PROGRESS, progress)

    def finish(self, record: int, key: int, value: Any) -> None:
        """The lane's sums: from now on they count, whatever happens to this process."""
        at = record * _RECORD_BYTES
        self._write(at, value)
        self._memory.store(at + _SEAL, key)

    def entries(self, key: int) -> list[Entry]:
        """What is known of an evaluation's lanes, the finished ones first."""
        found = []
        for record in np.flatnonzero(self._keys == np.uint64(key)).tolist():
            entry = self._read(record * _RECORD_BYTES, key)
            if entry is not None:
                found.append(entry)
        return sorted(found, key=lambda each: each.value is None)

    # --- totals -------------------------------------------------------------------------------

    def total(self, key: int) -> Any:
        """The total that counts; None while there is none."""
        word = self._memory.load(self._winner(key))
        if word >> _RANK_BITS != key >> _RANK_BITS:
            return None
        at = self._value(word & ((1 << _RANK_BITS) - 1), key)
        if self._memory.load(at + _KEY) != key:
            return None
        value = self._body(at)
        fence()
        return value if self._memory.load(at + _KEY) == key else None

    def agree(self, key: int, rank: int, value: Any) -> Any:
        """The total of whoever comes first."""
        found = self.total(key)
        if found is not None:
            return found
        at = self._value(rank, key)
        self._memory.store(at + _KEY, 0)
        fence()
        self._write(at, value)
        self._memory.store(at + _KEY, key)
        winner = self._winner(key)
        seen = self._memory.load(winner)
        self._memory.swap(winner, seen, key >> _RANK_BITS << _RANK_BITS | rank)
        found = self.total(key)
        return value if found is None else found

    # --- bytes --------------------------------------------------------------------------------

    def _read(self, at: int, key: int) -> Entry | None:
        if self._memory.load(at + _KEY) != key:
            return None
        is_done = self._memory.load(at + _SEAL) == key
        lane, pid, progress = (self._memory.load(at + word) for word in (_LANE, _PID, _PROGRESS))
        value = self._body(at) if is_done else None
        fence()
        if self._memory.load(at + _KEY) != key:
            return None
        return Entry(lane=lane, pid=pid, progress=progress, value=value)

    def _write(self, at: int, value: Any) -> None:
        body = json.dumps(value).encode()
        room = _RECORD_BYTES - _BODY
        if len(body) > room:
            raise ConfigError(
                f"an evaluation returned {len(body)} bytes of sums, there is room for {room}",
                fix="return fewer or shorter names",
            )
        self._bytes[at + _BODY : at + _BODY + len(body)] = memoryview(body)
        self._memory.store(at + _LENGTH, len(body))

    def _body(self, at: int) -> Any:
        length = min(self._memory.load(at + _LENGTH), _RECORD_BYTES - _BODY)
        try:
            return json.loads(self._bytes[at + _BODY : at + _BODY + length].tobytes())
        except ValueError:
            return None  # it is being overwritten, which the key will say

    def _winner(self, key: int) -> int:
        return self._winners_at + 8 * (key % _TOTALS)

    def _value(self, rank: int, key: int) -> int:
        place = rank % self._most_ranks * _TOTALS + key % _TOTALS
        return self._values_at + place * _RECORD_BYTES
