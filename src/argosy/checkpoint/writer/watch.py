"""Looks after the writer process of a host for one who cannot go before its saves are over: how far they are, and whether it hangs.

One that hangs is killed: what it holds is needed. Used by the trainer's last saves, which have the state in memory and are in a hurry, and by who loads what a dead session may have
left to it. No torch.
"""

from __future__ import annotations

import time
from pathlib import Path

from argosy.checkpoint.reports import Reports
from argosy.checkpoint.writer import client

_LOOK_SECONDS = 1.0
PATIENT_SECONDS = 60.0
HURRIED_SECONDS = 6.0
"""Less than the usual grace of one that is told to stop; a writer that does not hang answers at once."""


class WriterWatch:
    """Tells how far the writer is: who waits for it is not killed as long as it goes on, and the person sees why."""

    def __init__(self, store: Path, reports: Reports, deaf_seconds: float) -> None:
        """One that does not answer for so long hangs."""
        self._store = store
        self._reports = reports
        self._deaf_seconds = deaf_seconds
        self._looked_at = time.monotonic()
        self._deaf_since: float | None = None
        """When it was first asked without an answer."""
        self._told: set[tuple[int, int, int]] = set()
        self.is_deaf = False
        """Whether there was one that had not answered for a while."""

    def look(self) -> None:
        """Ask it how far it is, now and then; end one that does not answer."""
        if time.monotonic() - self._looked_at < _LOOK_SECONDS:
            return
        asked_at = time.monotonic()
        doing = client.ask(self._store)
        self._looked_at = time.monotonic()
        if doing is not None:
            self._tell(doing)
            return
        self._deaf_since = self._deaf_since or asked_at
        if self._looked_at - self._deaf_since >= self._deaf_seconds:
            self.is_deaf = True
            client.end_hung(self._store)
            self._deaf_since = None  # the next one has as long

    def _tell(self, doing: list[tuple[int, int, int]]) -> None:
        self._deaf_since = None
        for one in set(doing) - self._told:
            self._told.add(one)
            self._reports.advance("written", *one)
