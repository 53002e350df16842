"""One thread, one poll loop: descriptors and timers call back.

Everything in the keeper runs from here. A callback that raises is logged and, if it keeps raising, its descriptor is
dropped: one bad peer never ends the keeper. There is no periodic wakeup; an idle loop sleeps in epoll.
"""

from __future__ import annotations

import heapq
import itertools
import select
import sys
import time
import traceback
from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
URGENT = select.EPOLLPRI
_MOST_FAILURES = 3
_MOST_SLEEP_SECONDS = 86400.0


class Timer:
    """A callback due at a monotonic second; `cancel()` may be called at any time."""

    __slots__ = ("callback", "due", "is_cancelled")

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        """Never call back; again is fine."""
        self.is_cancelled = True


class Loop:
    """Watches descriptors with epoll and timers with a heap."""

    def __init__(self) -> None:
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._failures: dict[int, int] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: list[Callable[[], None]] = []
        self._forgotten: set[int] = set()
        """Descriptors that were forgotten in this wake: whoever has such a number now did not wake us."""
        self._is_running = False
        self.woke_at = 0.0
        """When this turn began."""
        self.keep: tuple[object, ...] = ()
        """Objects that must live as long as the loop."""

    def watch(self, fd: int, mask: int, callback: Callable[[int], None]) -> None:
        """Call back with the event mask whenever the descriptor is ready; again changes mask and callback."""
        if fd in self._callbacks:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)
        self._callbacks[fd] = callback

    def forget(self, fd: int) -> None:
        """Stop watching; must be called before the descriptor is closed. Again is fine."""
        if self._callbacks.pop(fd, None) is None:
            return
        self._forgotten.add(fd)
        self._failures.pop(fd, None)
        try:
            self._epoll.unregister(fd)
        except OSError:
            pass  # the descriptor was closed already: the kernel has forgotten it

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, no earlier than that many seconds from now."""
        timer = Timer(time.monotonic() + max(0.0, seconds), callback)
        heapq.heappush(self._timers, (timer.due, next(self._order), timer))
        return timer

    def soon(self, callback: Callable[[], None]) -> None:
        """Call back once before the loop sleeps again."""
        self._soon.append(callback)

    def stop(self) -> None:
        """Return from `run()` after the callbacks of this wake."""
        self._is_running = False

    def run(self) -> None:
        """Serve until `stop()`."""
        self._is_running = True
        while self._is_running:
            ready = self._epoll.poll(self._sleep_seconds(), 256)
            self.woke_at = time.monotonic()
            self._forgotten.clear()
            for fd, mask in ready:
                callback = self._callbacks.get(fd)
                if callback is not None and fd not in self._forgotten:
                    self._call_watcher(fd, callback, mask)
            self._call_due()
            self._call_soon()
        self._epoll.close()

    def _sleep_seconds(self) -> float:
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        if self._soon:
            return 0.0
        if not self._timers:
            return -1.0
        # Rounded up: epoll counts whole milliseconds, and waking early would spin.
        return min(max(0.0, self._timers[0][0] - time.monotonic()) + 0.001, _MOST_SLEEP_SECONDS)

    def _call_watcher(self, fd: int, callback: Callable[[int], None], mask: int) -> None:
        try:
            callback(mask)
            if self._failures:
                self._failures.pop(fd, None)
        except Exception:  # noqa: BLE001 - the entry point of every descriptor; the keeper must outlive a bug
            log_exception(f"callback of descriptor {fd}")
            self._failures[fd] = self._failures.get(fd, 0) + 1
            if self._failures[fd] >= _MOST_FAILURES:
                log(f"descriptor {fd} is dropped after {_MOST_FAILURES} failures")
                self.forget(fd)

    def _call_due(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.is_cancelled:
                self._call(timer.callback)

    def _call_soon(self) -> None:
        callbacks, self._soon = self._soon, []
        for callback in callbacks:
            self._call(callback)

    @staticmethod
    def _call(callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - the entry point of every timer; the keeper must outlive a bug
            log_exception("a timer")


def log(text: str) -> None:
    """One line to the keeper's log (standard error); a full disk is ignored."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        print(f"{stamp} keeper: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass


def log_exception(where: str) -> None:
    """The current exception with its traceback to the keeper's log."""
    log(f"{where} failed:\n{traceback.format_exc()}")
