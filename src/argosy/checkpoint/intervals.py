"""How often to save: the interval that loses least time, from what a save costs and how often something fails.

Young's and Daly's estimate with the cost and the failure rate as they are measured, smoothed, and with a cautious guess before there is anything
to measure. Pure: the caller brings times, and keeps what has failed from session to session (sessions.py); the checkpointer asks it for the next step
to save at.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from argosy.errors import ConfigError

DAY_SECONDS = 86_400.0
_SMOOTHING = 0.2
_SHARE_BESIDE = 0.1
"""Of the time until a save beside training is durable: it shares processors, memory and disk with it. Taken for granted where more is not measured."""


def interval_seconds(cost_seconds: float, failure_seconds: float) -> float:
    """Seconds of work between saves that each cost so much, when failures come so many seconds apart on average (Daly 2006)."""
    if not cost_seconds >= 0 or not failure_seconds > 0:
        raise ConfigError(
            f"a save of {cost_seconds} s and a failure every {failure_seconds} s make no interval",
            fix="give seconds above 0",
        )
    if cost_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = math.sqrt(cost_seconds / (2 * failure_seconds))
    young = math.sqrt(2 * cost_seconds * failure_seconds)
    return young * (1 + ratio / 3 + ratio * ratio / 9) - cost_seconds


def lost_share(interval: float, cost_seconds: float, failure_seconds: float) -> float:
    """The share of time that saving, and redoing what was not saved, takes at an interval; restarting costs the same at any."""
    period = interval + cost_seconds
    failures = math.expm1(period / failure_seconds) if period < 500 * failure_seconds else math.inf
    return 1 - interval / (failure_seconds * failures) if failures else 0.0


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier sessions of a store, and the one under way, have come to."""

    failures: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0
    """Sessions that began to save and did not end: killed, crashed, without power."""
    watched_seconds: Annotated[float, msgspec.Meta(ge=0, le=1e15)] = 0.0
    """So long sessions have lasted, each from its first save to what was noted of it last."""
    is_open: bool = False
    """A session goes on, or has failed."""
    noted_at: Annotated[float, msgspec.Meta(ge=0, le=1e15)] = 0.0
    """Unix time."""

    def resumed(self) -> Past:
        """A new session finds this: one that is still open has failed."""
        return msgspec.structs.replace(self, failures=self.failures + self.is_open, is_open=False)

    def noted(self, now: float, most_seconds: float) -> Past:
        """A session goes on, or begins; since it was noted last no more than this can have passed, whatever the clock says."""
        since = max(0.0, min(now - self.noted_at, most_seconds)) if self.is_open else 0.0
        watched = self.watched_seconds + since
        return msgspec.structs.replace(self, watched_seconds=watched, is_open=True, noted_at=now)

    def ended(self, now: float, most_seconds: float) -> Past:
        """A session ends as it should."""
        return msgspec.structs.replace(self.noted(now, most_seconds), is_open=False)


class Failures:
    """How often something fails: counted, with one failure a day taken for granted until there is more to go by."""

    def __init__(
        self, before: Past | None = None, *, expected_seconds: float = DAY_SECONDS
    ) -> None:
        self.before = before or Past()
        """Set by whoever has read it; in whatever thread."""
        self._expected_seconds = expected_seconds
        self._watched_seconds = 0.0

    def watched(self, seconds: float) -> None:
        """So long nothing has failed in this session."""
        self._watched_seconds += max(0.0, seconds)

    @property
    def count(self) -> int:
        """Sessions that have failed."""
        return self.before.failures

    @property
    def watched_seconds(self) -> float:
        """So long it was counted."""
        return self.before.watched_seconds + self._watched_seconds

    @property
    def seconds(self) -> float:
        """Mean time between failures."""
        return (self._expected_seconds + self.watched_seconds) / (1 + self.count)


class Interval:
    """Steps between saves, from measured times; the first save is due after a minute of steps."""

    def __init__(
        self,
        failures: Failures | None = None,
        *,
        fewest_steps: int = 1,
        most_seconds: float = 3600.0,
        first_seconds: float = 60.0,
    ) -> None:
        self.failures = failures or Failures()
        self._fewest_steps = fewest_steps
        self._most_seconds = most_seconds
        self._first_seconds = first_seconds
        self._step_seconds: float | None = None
        self._cost_seconds: float | None = None
        self._durable_seconds = 0.0

    def saw_steps(self, steps: int, seconds: float) -> None:
        """So many steps took so long."""
        if steps > 0 and seconds > 0:
            self._step_seconds = _smoothed(self._step_seconds, seconds / steps)
            self.failures.watched(seconds)

    def saw_save(self, cost_seconds: float) -> None:
        """A save cost training so much."""
        self._cost_seconds = _smoothed(self._cost_seconds, max(0.0, cost_seconds))

    def saw_durable(self, seconds: float) -> None:
        """One that went on beside training was durable after so long: that was not for nothing."""
        self._durable_seconds = max(0.0, seconds)
        least = _SHARE_BESIDE * self._durable_seconds
        self._cost_seconds = max(self._cost_seconds or 0.0, least)

    @property
    def seconds(self) -> float:
        """Between saves; never less than a save takes to become durable."""
        if self._cost_seconds is None:
            return min(self._first_seconds, self._most_seconds)
        found = interval_seconds(self._cost_seconds, self.failures.seconds)
        return min(self._most_seconds, max(found, self._durable_seconds))

    def steps(self) -> int:
        """Between saves."""
        if self._step_seconds is None:
            return self._fewest_steps
        return max(self._fewest_steps, round(self.seconds / self._step_seconds))

    def statistics(self) -> dict[str, float]:
        """What it goes by."""
        return {
            "step_seconds": self._step_seconds or 0.0,
            "cost_seconds": self._cost_seconds or 0.0,
            "failures": float(self.failures.count),
            "watched_seconds": self.failures.watched_seconds,
            "failure_seconds": self.failures.seconds,
            "interval_seconds": self.seconds,
            "interval_steps": float(self.steps()),
        }


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + _SMOOTHING * (now - before)
