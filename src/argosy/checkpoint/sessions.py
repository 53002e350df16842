"""How earlier sessions of a store have ended: the file `.sessions`, from which the automatic interval knows how often something fails.

`Record` reads and writes it; what it comes to is decided in intervals.py. `Session` is the life of a checkpointer from its first save to its end; a
trainer, whose session outlives its ranks, uses the record itself. Nothing that goes wrong here costs a save: a file that is missing or damaged begins
anew. Called at the first save, when saves are durable and at the end, never in a step. No torch.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from argosy.checkpoint import names
from argosy.checkpoint.intervals import Failures, Past

_LOG = logging.getLogger("argosy.checkpoint")
_NOTED_SECONDS = 60.0
"""A session that was noted more recently is not noted again while it goes on."""
_MOST_BYTES = 4096


class Record:
    """The file of one store."""

    def __init__(
        self,
        store: Path,
        *,
        earlier: Path | None = None,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`earlier` is a store that this one goes on from: its past counts until this one has its own."""
        self._store = store
        self._earlier = earlier
        self._now = now
        self._clock = clock
        self._since = clock()

    def read(self) -> Past:
        """What is known; nothing when the file is not there or makes no sense."""
        found = _read(self._store)
        if found is None and self._earlier is not None:
            found = (_read(self._earlier) or Past()).resumed()
        return found or Past()

    def resume(self) -> Past:
        """What was going on here is lost: count it, once."""
        found = _read(self._store) or Past()
        if found.is_open:
            self._write(found := found.resumed())
        return found

    def note(self, *, is_new: bool = False) -> Past:
        """A session goes on; `is_new`: another one than that of which the file says so."""
        before, now = self.read(), self._now()
        if is_new:
            before = before.resumed()
        if before.is_open and 0 <= now - before.noted_at < _NOTED_SECONDS:
            return before
        return self._write(before.noted(now, self._clock() - self._since))

    def end(self) -> None:
        """It has ended as it should."""
        before = self.read()
        if before.is_open:
            self._write(before.ended(self._now(), self._clock() - self._since))

    def _write(self, past: Past) -> Past:
        """Whole or not at all. The rename is flushed by the commit that follows it, or lost with it."""
        draft = self._store / names.sessions_draft(os.getpid())
        try:
            with open(draft, "wb") as file:
                file.write(msgspec.json.encode(past) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self._store / names.SESSIONS)
        except OSError as failure:
            _LOG.info("failures of %s are not counted: %s", self._store, failure)
            with contextlib.suppress(OSError):
                draft.unlink()
        self._since = self._clock()
        return past


class Session:
    """This process's, from its first save to its end."""

    def __init__(self, record: Record, failures: Failures) -> None:
        self._record = record
        self._failures: Failures | None = failures
        """To be told of the past, once: they count on from there."""
        self._lock = threading.Lock()
        self._pid = 0
        """The process that has begun it; none before and after."""

    def begin(self) -> None:
        """It saves, and has the store's lock from here on."""
        with self._lock:
            past = self._record.note(is_new=True)
            if self._failures is not None:
                self._failures.before, self._failures = past, None
            self._pid = os.getpid()
            atexit.register(self._leave)

    def note(self) -> None:
        """It goes on; in whatever thread."""
        with self._lock:
            if self._pid == os.getpid():
                self._record.note()

    def end(self) -> None:
        """It ends as it should, while it still has the store's lock."""
        with self._lock:
            if self._pid == os.getpid():
                self._record.end()
        self.abandon()

    def abandon(self) -> None:
        """It ends otherwise: the next one counts it."""
        if self._pid:
            self._pid = 0
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """The program ends without having closed anything: that is no failure unless an exception ends it."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, Exception) and not hasattr(sys, "ps1"):
            self.abandon()
        else:
            self.end()


def _read(store: Path) -> Past | None:
    try:
        with open(store / names.SESSIONS, "rb") as file:
            return msgspec.json.decode(file.read(_MOST_BYTES), type=Past)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
