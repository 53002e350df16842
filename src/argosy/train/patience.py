"""How long to wait for the others before one of them is taken for hung, learned from the steps that were done.

Waits end after three median steps and a little more; then whoever is waited for is looked at. One that is stopped or uses no CPU is accused at once, one that computes only much later: it is slow,
or loops for ever. The runtime takes stacks and kills the accused; his lanes are then recomputed like a dead rank's. What is thought of whom is pure (suspicions.py, recovery.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from argosy.errors import TimedOut
from argosy.train.crew import Crew
from argosy.train.roster import activity
from argosy.train.suspicions import Glance, Suspicions

T = TypeVar("T")
_SLICE_SECONDS = 0.25


class Patience:
    """Bounded waits of one rank."""

    def __init__(self, crew: Crew, *, first_seconds: float, more_seconds: float) -> None:
        self._crew = crew
        self._suspicions = Suspicions(first_seconds=first_seconds, more_seconds=more_seconds)

    def learn(self, seconds: float) -> None:
        """A step took so long."""
        self._suspicions.learn(seconds)

    @property
    def median_seconds(self) -> float:
        """Of the last steps; 0 before the second."""
        return self._suspicions.median_seconds

    def wait(self, call: Callable[[float], T], awaited: Callable[[], list[int]]) -> T:
        """`call(deadline)` until it returns; `awaited()` names the ranks that keep it waiting."""
        self._suspicions.begin(time.monotonic())
        while True:
            try:
                return call(time.monotonic() + _SLICE_SECONDS)
            except TimedOut as silence:
                # Somebody may get on with an evaluation, say, which all the others may be in.
                self._suspicions.note_work(time.monotonic(), self._done_beside())
                self._look_at(awaited(), silence.what)

    def _done_beside(self) -> list[int]:
        crew = self._crew
        return [crew.roster.advances(crew.pid_of(rank)) for rank in crew.members]

    def _look_at(self, ranks: list[int], what: str) -> None:
        crew = self._crew
        for rank in ranks:
            pid, now = crew.pid_of(rank), time.monotonic()
            if pid == os.getpid() or self._suspicions.is_accused(now, pid):
                continue
            state, ticks = activity(pid)
            glance = Glance(
                state=state,
                ticks=ticks,
                beats=crew.roster.beats(pid),
                is_outside=crew.roster.is_outside(pid),
                is_done=crew.roster.has_left_loop(pid),
            )
            reason = self._suspicions.judge(now, rank, pid, glance)
            if reason:
                crew.gang.suspect(rank, f"{reason}; {what}", pid=pid)
