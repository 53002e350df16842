"""How long to wait for the others before one of them is taken for hung, learned from the steps that were done.

Waits end after three median steps and a little more; then whoever is waited for is looked at. One that is stopped or uses no CPU is accused at once, one that computes only much later: it is slow,
or loops for ever. The runtime takes stacks and kills the accused; his lanes are then recomputed like a dead rank's. The verdict itself is pure (recovery.py).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from argosy.errors import TimedOut
from argosy.train import recovery
from argosy.train.crew import Crew
from argosy.train.roster import activity

T = TypeVar("T")
_STEPS = 32
_SLICE_SECONDS = 0.25
_BEAT_SECONDS = 1.0
"""Who waits looks up twenty times a second where there is a core for it."""
_AGAIN_SECONDS = 15.0
"""An accusation that nothing came of is said again: it may have been lost with a connection."""


class Patience:
    """Bounded waits of one rank."""

    def __init__(self, crew: Crew, *, first_seconds: float, more_seconds: float) -> None:
        self._crew = crew
        self._first_seconds = first_seconds
        self._more_seconds = more_seconds
        self._durations: deque[float] = deque(maxlen=_STEPS)
        self._accused: dict[int, float] = {}
        """Process ids, and when."""
        self._seen: dict[int, recovery.Sighting] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        """Of each rank looked at: its beats, and when they were last seen to grow."""

    def learn(self, seconds: float) -> None:
        """A step took so long."""
        self._durations.append(seconds)

    @property
    def median_seconds(self) -> float:
        """Of the last steps; 0 before the first."""
        return statistics.median(self._durations) if self._durations else 0.0

    def wait(self, call: Callable[[float], T], awaited: Callable[[], list[int]]) -> T:
        """`call(deadline)` until it returns; `awaited()` names the ranks that keep it waiting."""
        started = time.monotonic()
        self._seen, self._beats = {}, {}
        done: list[int] | None = None
        while True:
            try:
                return call(time.monotonic() + _SLICE_SECONDS)
            except TimedOut as silence:
                before, done = done, self._done_beside()
                if before is not None and done != before:
                    # Somebody gets on with an evaluation, say, which all the others may be in.
                    started = time.monotonic()
                    self._seen, self._beats = {}, {}
                self._look_at(awaited(), time.monotonic() - started, silence.what)

    def _done_beside(self) -> list[int]:
        crew = self._crew
        return [crew.roster.advances(rank, crew.pid_of(rank)) for rank in crew.members]

    def _look_at(self, ranks: list[int], waited: float, what: str) -> None:
        limits = recovery.Limits(
            median=self.median_seconds, more=self._more_seconds, first=self._first_seconds
        )
        for rank in ranks:
            pid = self._crew.pid_of(rank)
            is_accused = time.monotonic() - self._accused.get(pid, -math.inf) < _AGAIN_SECONDS
            if rank == self._crew.rank or is_accused:
                continue
            state, ticks = activity(pid)
            is_waiting = self._waits(rank, pid, waited)
            now = recovery.Sighting(
                at=waited,
                ticks=ticks,
                state=state,
                is_waiting=is_waiting,
                is_outside=self._crew.roster.is_outside(rank, pid),
            )
            before = self._seen.get(rank)
            if before is None or before.ticks != ticks or is_waiting:
                self._seen[rank] = before = now
            reason = recovery.accuse(waited, before, now, limits)
            if reason:
                self._accused[pid] = time.monotonic()
                self._crew.gang.suspect(rank, f"{reason}; {what}", pid=pid)

    def _waits(self, rank: int, pid: int, at: float) -> bool:
        """Whether a rank has looked up from a wait of its own lately."""
        beats = self._crew.roster.beats(rank, pid)
        known, last = self._beats.get(rank, (beats, -math.inf))
        if beats != known:
            last = at
        self._beats[rank] = (beats, last)
        return at - last < _BEAT_SECONDS
