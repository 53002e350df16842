"""Presence: one process per part. A lock that dies with its holder, and a watch on the keeper's life.

Used by controller and agent at their start. Locks are close-on-exec and wait a few seconds, since a successor may be started
while its predecessor is still dying.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Callable

from argosy.errors import ClusterError

_LOCK_SECONDS = 5.0


def take_lock(path: str, part: str, *, patience_seconds: float = _LOCK_SECONDS) -> int:
    """Hold the part's lock until this process ends; ClusterError when another one keeps it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        if time.monotonic() > deadline:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
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
