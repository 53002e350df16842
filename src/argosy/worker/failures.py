"""The failures of a household: how many of each class there were, what they said, and why there is no further start. Pure.

Part of upkeep.py, which says which class a failure is of and what was known of the life that it ended. The budgets are the defaults of a cluster,
and so is what a repeated error means (protocol/lastwords.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config.spec import Backoff, Budget
from argosy.protocol import lastwords

LONG_SECONDS = Backoff().most_seconds
"""Whoever lived so long has worked, whether it told of steps or not."""
_BUDGET = Budget()
_NAMES = {
    "user": "failures of the program",
    "host": "failures of the host",
    "hang": "hangs",
}
_FIRST_WAIT_SECONDS = 0.1
_MOST_WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What of a failed member's life matters here."""

    error: str
    """Its traceback or message."""
    since: int
    """The oldest generation that it was a member of."""
    is_long: bool
    has_progressed: bool
    """Whether any member of its generation has made a step in its life."""


class Failures:
    """Counts of one household."""

    def __init__(self, num_ranks: int) -> None:
        self.last_error = ""
        """What the last failing process left."""
        self._num_ranks = num_ranks
        self._times: dict[str, list[float]] = {name: [] for name in _NAMES}
        """When failures of each class happened, of the last period."""
        self._words = ""
        """The last words of the last failing program, while no step was made since."""
        self._words_at = 0
        """The generation in which it said so."""
        self._repeats = 0
        """How often in a row these were the words."""
        self._fruitless = 0
        self._counted = (0.0, 0, "")
        """When the last failure of the program was counted, in which generation, and its last words while no step was made since."""

    def note_step(self) -> None:
        """The program makes progress."""
        self._words, self._words_at, self._repeats, self._fruitless = "", 0, 0, 0
        self._counted = (*self._counted[:2], "")

    def add(self, failure: str, at: float, life: Life, generation: int) -> None:
        """Count one more, of a member of this generation."""
        self._fruitless += 1
        self.last_error = life.error
        if failure == "user":
            if self._is_aftermath(at, life):
                return
            self._counted = at, generation, lastwords.last_words(life.error)
        since = at - _BUDGET.period_seconds
        self._times[failure] = [*(time for time in self._times[failure] if time > since), at]
        # Who was there at the last failure fails together with it: that is once.
        if failure == "user" and life.since > self._words_at:
            said = lastwords.last_words(life.error)
            said = lastwords.words_that_count(said, is_long=life.is_long)
            self._repeats = self._repeats + 1 if said and said == self._words else 1
            self._words, self._words_at = said, generation

    def _is_aftermath(self, at: float, life: Life) -> bool:
        """Whether it was there at the failure that was counted last and has no other: what all ranks raise has happened once."""
        then, generation, said = self._counted
        is_same = bool(said) and lastwords.last_words(life.error) == said
        return life.since <= generation and (is_same or at - then <= lastwords.TOGETHER_SECONDS)

    def why_given_up(self, failure: str, life: Life) -> str:
        """Why there is no further start after the failure that was just counted; empty: there may be one."""
        allowed: int = getattr(_BUDGET, failure)
        if len(self._times[failure]) > allowed:
            return f"the budget of {allowed} restarts after {_NAMES[failure]} is spent"
        if failure != "user":
            return ""
        if self._words and self._repeats >= _BUDGET.same_error:
            return lastwords.describe_repeats(self._repeats)
        if life.has_progressed or life.is_long:
            return ""
        return lastwords.why_hopeless(life.error)

    def describe_restart(self, failure: str) -> str:
        """`restart 2 of 3`: which of the restarts that this class may cost is the next one."""
        after = "" if failure == "user" else f" after {_NAMES[failure]}"
        return f"restart {len(self._times[failure])} of {getattr(_BUDGET, failure)}{after}"

    def wait_seconds(self) -> float:
        """How long to wait before the next start: longer with each failure without a step, once every rank may have had one."""
        row = self._fruitless - self._num_ranks
        return min(_FIRST_WAIT_SECONDS * 2.0 ** min(10, row), _MOST_WAIT_SECONDS) if row > 0 else 0

    def statistics(self) -> dict[str, int]:
        """How many of each class there were in the last period."""
        return {name: len(times) for name, times in self._times.items()}
