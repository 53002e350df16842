"""EventRows: the event log of a simulated cluster, with its deletion of forgotten runs in pieces.

What the controller reads after a crash is what eventlog.py would give it: rows of doomed runs are left out, wherever their deletion
stands. Costs a few dictionary operations for each event.
"""

from __future__ import annotations

from collections.abc import Iterator

from argosy.protocol.facts import Event, RunsForgotten


class EventRows:
    """Durable events by number."""

    def __init__(self) -> None:
        self.mark = 0
        self.doomed: dict[str, None] = {}
        self.num_appended = 0
        self.num_deleted = 0
        self._rows: dict[int, Event] = {}
        self._of_run: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, event: Event) -> None:
        """It is durable now; so is what it forgets."""
        self._rows[event.seq] = event
        self.num_appended += 1
        if run := _run_of(event):
            self._of_run.setdefault(run, []).append(event.seq)
        if isinstance(event.fact, RunsForgotten):
            self.doomed.update(dict.fromkeys(event.fact.runs))
            self._rows.pop(self.mark, None)
            self.mark = event.seq

    def delete_some(self, limit: int) -> None:
        """Delete up to so many rows of doomed runs, the oldest of each run first."""
        for run in list(self.doomed):
            numbers = self._of_run.get(run, [])
            below = [seq for seq in numbers if seq < self.mark]
            for seq in below[:limit]:
                del self._rows[seq]
                self.num_deleted += 1
            self._of_run[run] = numbers[min(limit, len(below)) :]
            limit -= len(below)
            if limit < 0:
                return
            del self.doomed[run]

    def replay(self) -> Iterator[Event]:
        """What a controller reads at its start."""
        for event in self._rows.values():
            if _run_of(event) not in self.doomed or event.seq > self.mark:
                yield event


def _run_of(event: Event) -> str:
    return getattr(event.fact, "run", "") or getattr(event.fact, "about", "")
