"""Retention: which ended runs are still known. The newest are; the oldest are forgotten, a batch at a time, and large ones earlier.

Owned by the coordinator, which makes the fact of it; the event log then deletes their events. A run that lives, waits, is watched
or was asked for lately is never chosen. Pure; it deletes nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

from argosy.control.identity import counter_of
from argosy.errors import ForgottenError, NotFoundError

KEEP_ENDED = 1000
KEEP_ATTEMPTS = 20_000
"""Starts of processes in those runs: a new controller reads the events of them all."""
LEAST_ENDED = 10
"""So many of the newest are kept however large they were, and their starts do not count."""
MOST_AT_ONCE = 1000
"""Runs in one fact: a log from before there was retention is worked off in several."""


class Retention:
    """The ended runs of one cluster, and how many runs there ever were."""

    def __init__(self, keep_ended: int = KEEP_ENDED) -> None:
        self.keep_ended = keep_ended
        self.batch = max(1, keep_ended // 10)
        self.num_submitted = 0
        self.num_forgotten = 0
        """Of which this controller knows."""
        self.keep_attempts = KEEP_ATTEMPTS
        self._ended: dict[str, int] = {}
        """Starts of processes of each, in the order of their ends; one that is asked for counts as the newest."""
        self._num_attempts = 0
        self._held: Counter[str] = Counter()

    def end(self, run: str, num_attempts: int) -> None:
        """A run has ended, after so many starts of processes."""
        self._ended[run] = num_attempts
        self._num_attempts += num_attempts

    def has_ended(self, run: str) -> bool:
        """It has, and is not forgotten."""
        return run in self._ended

    def ask(self, run: str) -> None:
        """Somebody wants to know about it."""
        if run in self._ended:
            self._ended[run] = self._ended.pop(run)

    @contextmanager
    def held(self, run: str) -> Iterator[None]:
        """It stays known meanwhile."""
        self._held[run] += 1
        try:
            yield
        finally:
            self._held[run] -= 1
            if not self._held[run]:
                del self._held[run]

    def choose(self, is_busy: Callable[[str], bool]) -> list[str]:
        """The runs to forget now: none until there is a batch of them beyond those that are kept."""
        excess = max(len(self._ended) - self.keep_ended, 0)
        if excess >= self.batch:
            surplus, least = list(islice(self._ended, min(excess, MOST_AT_ONCE))), self.batch
        else:
            surplus, least = self._too_large(), 1
        chosen = [run for run in surplus if run not in self._held and not is_busy(run)]
        return chosen if len(chosen) >= least else []

    def _too_large(self) -> list[str]:
        """The runs that have to go because all but the newest are clearly too large together: few large ones rather than many small ones."""
        newest = sum(islice(reversed(self._ended.values()), LEAST_ENDED))
        too_many = self._num_attempts - newest - self.keep_attempts
        if too_many <= self.keep_attempts // 10:
            return []
        older = list(islice(self._ended.items(), len(self._ended) - LEAST_ENDED))
        older.sort(key=lambda run: -run[1].bit_length())  # of those of about one size the oldest
        surplus = []
        for run, num_attempts in older[:MOST_AT_ONCE]:
            if too_many <= 0:
                break
            too_many -= num_attempts
            surplus.append(run)
        return surplus

    def forget(self, runs: list[str]) -> None:
        """They were forgotten."""
        self.num_forgotten += len(runs)
        for run in runs:
            self._num_attempts -= self._ended.pop(run, 0)

    def missing(self, run: str, runs_directory: str) -> NotFoundError:
        """The error for a run that is not known."""
        counter = counter_of(run)
        if self.num_forgotten and counter is not None and 0 < counter <= self.num_submitted:
            return ForgottenError(
                f"run {run} is not known any more: of the runs that have ended, the newest "
                f"{self.keep_ended} are kept, those with very many processes for a shorter time",
                fix=f"look in {runs_directory}/{run}: what is left of it; end.json says how it ended",
            )
        return NotFoundError(f"there is no run {run}", fix="`argosy ps` lists the runs")
