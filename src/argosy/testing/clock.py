"""VirtualClock: time that moves only when somebody runs it, and the order of what happens at equal times.

Everything in the simulator is scheduled here; equal times keep the order of scheduling, so a seed gives one history.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class VirtualClock:
    """A heap of things to come."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self.now = start
        self.num_events = 0
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def call_at(self, at: float, action: Callable[[], None]) -> None:
        """Do it then, or now if that is past."""
        self._order += 1
        heappush(self._heap, (max(at, self.now), self._order, action))

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it after so long."""
        self.call_at(self.now + seconds, action)

    def step(self) -> bool:
        """Do the next thing; False: there is none."""
        if not self._heap:
            return False
        self.now, _order, action = heappop(self._heap)
        self.num_events += 1
        action()
        return True

    def run_until(self, at: float) -> None:
        """Do everything up to a time and stand there."""
        while self._heap and self._heap[0][0] <= at:
            self.step()
        self.now = max(self.now, at)
