"""How fast and for how long the writer writes: a rate for the whole host, a deadline and news for each job, and a low priority.

The block writer asks a `Pace` before each block, in its writing threads. Nothing here touches files.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import threading
import time
from collections.abc import Callable

from argosy.errors import TimedOut

NICE = 10
_NEWS_SECONDS = 0.2
_IOPRIO_CALL = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_BEST_EFFORT, _LOWEST = 2 << 13, 7
_PROCESS = 1


class Rate:
    """Bytes per second of all jobs together; each caller is told how long to wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def delay(
        self, num_bytes: int, bytes_per_second: float, now: float, most: float = math.inf
    ) -> float:
        """Take so many bytes; seconds until they may be written. Nothing is taken when that is longer than `most`."""
        if bytes_per_second <= 0:
            return 0.0
        with self._lock:
            start = max(now, self._free_at)
            if start - now <= most:
                self._free_at = start + num_bytes / bytes_per_second
        return start - now


class Pace:
    """One job's: waits for its turn, ends it at its deadline, tells how far it is."""

    def __init__(
        self,
        rate: Rate,
        bytes_per_second: float,
        deadline_seconds: float,
        tell: Callable[[int], None],
    ) -> None:
        self._rate = rate
        self._bytes_per_second = bytes_per_second
        self._seconds = deadline_seconds
        self._deadline = time.monotonic() + deadline_seconds
        self._tell = tell
        self._lock = threading.Lock()
        self._begun = 0
        self._told_at = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        """Before a block."""
        now = time.monotonic()
        left = self._deadline - now
        wait = self._rate.delay(num_bytes, self._bytes_per_second, now, left)
        if wait > left or left < 0:
            raise TimedOut(
                f"the save was not written within {self._seconds:.0f} s",
                fix="give a longer deadline or a higher rate, or look at the disk",
            )
        if wait:
            time.sleep(wait)
            now = time.monotonic()
        with self._lock:
            news, is_due = self._begun, now - self._told_at >= _NEWS_SECONDS
            self._begun += num_bytes
            if is_due:
                self._told_at = now
        if is_due:
            self._tell(news)


def lower_priority() -> None:
    """Yield the processors and the disk to training; a system that refuses is fine."""
    try:
        os.nice(NICE)
    except OSError:
        pass
    number = _IOPRIO_CALL.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _PROCESS, 0, _BEST_EFFORT | _LOWEST)
