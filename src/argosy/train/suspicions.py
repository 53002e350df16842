"""What a rank has seen of those that keep it waiting, and whom it takes for hung; learned from the steps that were done. Pure.

Times, CPU ticks and beats go in as numbers, reasons for an accusation come out. Used by patience.py, which waits, looks and accuses, and by the simulator. The
verdict on one sighting is in recovery.py.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import msgspec

from argosy.train import recovery

_STEPS = 32
_BEAT_SECONDS = 1.0
"""Who waits looks up twenty times a second where there is a core for it."""
_AGAIN_SECONDS = 15.0
"""An accusation that nothing came of is said again: it may have been lost with a connection."""


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """A process as it looks at one moment."""

    state: str
    """Of the process, as the system has it; empty: it has ended."""
    ticks: int
    beats: int
    is_outside: bool
    is_done: bool = False
    """Whether its loop is over: what user code does then is awaited by nobody but one who comes too late."""


class Suspicions:
    """Of one rank; one wait at a time."""

    def __init__(self, *, first_seconds: float, more_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._more_seconds = more_seconds
        self._durations: deque[float] = deque(maxlen=_STEPS)
        self._has_made_one = False
        self._accused: dict[int, float] = {}
        """Process ids, and when."""
        self._started = 0.0
        self._done: list[int] | None = None
        self._seen: dict[int, recovery.Sighting] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        """Of each rank looked at: its beats, and when they were last seen to grow."""
        self._excused: dict[int, float] = {}
        """How long each was waited for when it was last seen to wait itself, or between two steps: its own time begins then."""

    def learn(self, seconds: float) -> None:
        """A step took so long. A process's first one is no measure: it may have come in the middle of it."""
        if self._has_made_one:
            self._durations.append(seconds)
        self._has_made_one = True

    @property
    def median_seconds(self) -> float:
        """Of the last steps; 0 before the second."""
        return statistics.median(self._durations) if self._durations else 0.0

    def begin(self, now: float) -> None:
        """A wait begins."""
        self._restart(now)
        self._done = None

    def note_work(self, now: float, done: list[int]) -> None:
        """How much work each member has done that is no step's: while it grows somebody gets on, and the wait begins anew."""
        before, self._done = self._done, done
        if before is not None and done != before:
            self._restart(now)

    def is_accused(self, now: float, pid: int) -> bool:
        """Whether this process was accused lately: it is not looked at again so soon."""
        return now - self._accused.get(pid, -math.inf) < _AGAIN_SECONDS

    def judge(self, now: float, rank: int, pid: int, glance: Glance) -> str:
        """Why a rank that is waited for is accused now; empty: it is not."""
        if glance.is_done:
            return ""
        waited = now - self._started
        is_waiting = self._is_waiting(rank, glance.beats, waited)
        sighting = recovery.Sighting(
            at=waited,
            ticks=glance.ticks,
            state=glance.state,
            is_waiting=is_waiting,
            is_outside=glance.is_outside,
        )
        before = self._seen.get(rank)
        if before is None or before.ticks != glance.ticks or is_waiting:
            self._seen[rank] = before = sighting
        limits = recovery.Limits(
            median=self.median_seconds, more=self._more_seconds, first=self._first_seconds
        )
        if is_waiting or glance.is_outside:
            self._excused[rank] = waited
        else:
            waited -= self._excused.get(rank, 0.0)
        reason = recovery.accuse(waited, before, sighting, limits)
        if reason:
            self._accused[pid] = now
        return reason

    def _restart(self, now: float) -> None:
        self._started = now
        self._seen, self._beats, self._excused = {}, {}, {}

    def _is_waiting(self, rank: int, beats: int, at: float) -> bool:
        """Whether a rank has looked up from a wait of its own lately."""
        known, last = self._beats.get(rank, (beats, -math.inf))
        if beats != known:
            last = at
        self._beats[rank] = (beats, last)
        return at - last < _BEAT_SECONDS
