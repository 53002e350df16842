"""Tally: small counts over the facts that the controller's doors need often: who waits, who runs, which rank is which.

Fed with every event, in replay and live, by the conductor. It answers from memory and never decides.
"""

from __future__ import annotations

from collections import Counter

from argosy.protocol.facts import (
    AttemptExited,
    AttemptPlanned,
    AttemptReleased,
    Event,
    RunAdmitted,
    RunEnded,
    RunsForgotten,
    RunSubmitted,
)

Place = tuple[str, int, int]
"""(role, index, number): what the name of an output file says."""
Ranks = dict[Place, int | None]


class Tally:
    """Runs by state, and the place and rank of every attempt."""

    def __init__(self) -> None:
        self.queued: set[str] = set()
        self.running: set[str] = set()
        self.tied: set[str] = set()
        """Runs alive that end with their client."""
        self.num_ended = 0
        self.unneeded: set[str] = set()
        """Digests of values whose last run has ended."""
        self._blobs: dict[str, set[str]] = {}
        """Digests of the values that each live run needs."""
        self._blob_runs: Counter[str] = Counter()
        self._ended_at: dict[str, int] = {}
        self._ranks: dict[str, Ranks] = {}
        self._attempts: dict[str, tuple[str, str, Place]] = {}

    def apply(self, event: Event) -> None:
        """Take in one event."""
        fact = event.fact
        if isinstance(fact, AttemptPlanned):
            place = (fact.role, fact.index, fact.number)
            self._attempts[fact.attempt] = (fact.run, fact.host, place)
            self._ranks.setdefault(fact.run, {})[place] = fact.rank
        elif isinstance(fact, AttemptReleased):
            if fact.attempt in self._attempts:
                self._ranks[fact.run][self._attempts[fact.attempt][2]] = fact.rank
        elif isinstance(fact, AttemptExited):
            self._attempts.pop(fact.attempt, None)
        elif isinstance(fact, RunSubmitted):
            self.queued.add(fact.run)
            environments = {fact.env_blob, *fact.role_env_blobs.values()}
            names = environments | set(fact.secret_blobs.values())
            self._blobs[fact.run] = {name for name in names if name}
            self._blob_runs.update(self._blobs[fact.run])
            self.unneeded -= self._blobs[fact.run]
            if fact.spec.tied:
                self.tied.add(fact.run)
        elif isinstance(fact, RunAdmitted):
            self.queued.discard(fact.run)
            self.running.add(fact.run)
        elif isinstance(fact, RunEnded):
            self._end(fact.run, event.seq)
        elif isinstance(fact, RunsForgotten):
            self.num_ended = fact.num_ended
            for run in fact.runs:
                self._ended_at.pop(run, None)
                self._ranks.pop(run, None)

    def _end(self, run: str, seq: int) -> None:
        self.queued.discard(run)
        self.running.discard(run)
        self.tied.discard(run)
        for name in self._blobs.pop(run, ()):
            self._blob_runs[name] -= 1
            if not self._blob_runs[name]:
                del self._blob_runs[name]
                self.unneeded.add(name)
        self.num_ended += 1
        self._ended_at[run] = seq

    @property
    def alive(self) -> set[str]:
        """Runs that have not ended: queued, running, services."""
        return self.queued | self.running

    @property
    def is_idle(self) -> bool:
        """Nothing is alive."""
        return not self.queued and not self.running

    def blobs(self) -> set[str]:
        """Digests of the values that live runs need."""
        return set(self._blob_runs)

    def is_needed(self, blob: str) -> bool:
        """Whether a live run needs the value."""
        return blob in self._blob_runs

    def end_of(self, run: str) -> int | None:
        """Sequence number of the run's end; None while it lives."""
        return self._ended_at.get(run)

    def ranks(self, run: str) -> Ranks:
        """Rank by place."""
        return self._ranks.setdefault(run, {})

    def find(self, attempt: str) -> tuple[str, str, Place] | None:
        """(run, host, place) of an attempt that has not been reaped."""
        return self._attempts.get(attempt)
