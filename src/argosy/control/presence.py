"""Presence: one process per part. A lock that dies with its holder, and a watch on the keeper's life.

Used by controller and agent at their start. Locks are close-on-exec and wait a few seconds, since a successor may be started
while its predecessor is still dying.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from argosy.control import locks
from argosy.errors import ClusterError

_LOCK_SECONDS = 5.0


def take_lock(path: str, part: str, *, patience_seconds: float = _LOCK_SECONDS) -> int:
    """Hold the part's lock until this process ends; ClusterError when another one keeps it."""
    deadline = time.monotonic() + patience_seconds
    while (descriptor := locks.take(path)) is None:
        if time.monotonic() > deadline:
            with open(path, encoding="ascii", errors="replace") as file:
                holder = file.read(32).strip() or "unknown"
            raise ClusterError(
                f"another {part} (pid {holder}) serves this home: it holds {path}",
                fix="use that one, or set ARGOSY_HOME to another directory",
            )
        # flock has no timeout, and a signal-based one would disturb the event loop to come.
        time.sleep(0.02)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


class LifeWatch:
    """Calls back once when a process has ended, at once if it is gone already."""

    def __init__(self, pid: int, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(on_death)
            return
        self._loop.add_reader(self._descriptor, self._died)

    def close(self) -> None:
        """Watch no longer."""
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _died(self) -> None:
        self.close()
        self._on_death()
