"""When the next save is due, the same on all ranks: the interval of intervals.py, measured by rank 0 and told to the others.

The ranks talk only when a new interval is set, when a save begins and once in the beginning; between those each counts steps. Owned by the checkpointer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from argosy.checkpoint.boards import Group
from argosy.checkpoint.intervals import Interval
from argosy.checkpoint.turns import Turn

_WARM_UP_STEPS = 5
"""The first steps are slower than the rest, and too few to go by."""


class Schedule:
    """Counts steps up to the next save."""

    def __init__(
        self, interval: Interval, group: Group, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval = interval
        self._group = group
        self._clock = clock
        self._since: tuple[int, float] | None = None
        self._next: int | None = None
        self._saving_seconds = 0.0

    def is_due(self, step: int) -> bool:
        """Whether to save at this step; all ranks ask at every step."""
        if self._since is None:
            self._since = step, self._clock()
        if self._next is None and step >= self._since[0] + _WARM_UP_STEPS:
            self._measure(step)
            self._settle(self._since[0], self._group.agree)
        return self._next is not None and step >= self._next

    def requested(self, step: int, turn: Turn | None = None) -> None:
        """A save begins: all ranks call it there, and only there they talk. Alone no turn is needed."""
        if self._since is not None:
            self._measure(step)
            self._settle(step, (turn or self._group).agree)
            # Only now: of a save that one rank refuses all go on counting from the same step.
            self._since = step, self._clock()

    def saved(self, cost_seconds: float) -> None:
        """What the save has cost training; it is not counted to the steps."""
        self.interval.saw_save(cost_seconds)
        self._saving_seconds += cost_seconds

    def became_durable(self, seconds: float) -> None:
        """How long a save beside training took; in whatever thread."""
        self.interval.saw_durable(seconds)

    def _measure(self, step: int) -> None:
        if self._since is not None:
            first, at = self._since
            self.interval.saw_steps(step - first, self._clock() - at - self._saving_seconds)
            self._saving_seconds = 0.0

    def _settle(self, step: int, agree: Callable[[bytes], list[bytes]]) -> None:
        mine = msgspec.json.encode(step + self.interval.steps())
        self._next = msgspec.json.decode(agree(mine)[0], type=int)
