"""Turns of a group: calls run in the order in which they were made, in their caller's thread where nobody has to be waited for.

`Turns.take` runs a job inline, or hands it to the group's one thread when the caller wants to go on; both give a `FinishedWork` or
`PendingWork` as torch expects it. The thread is started by the first asynchronous call and ends with `close`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from argosy.errors import ConfigError, TimedOut

Job = Callable[[], None]
_CLOSE_SECONDS = 5.0
_ENDED = threading.Event()
_ENDED.set()
_SHARED = threading.RLock()
"""For works that have ended, whose futures are made under it: a callback may ask for another work's future."""


class ArgosyWork(dist.Work):
    """A call that has ended or will: `wait()` raises what went wrong, `get_future()` gives the tensors."""

    def __init__(self, result: list[Any], *, has_ended: bool = False) -> None:
        super().__init__()
        self._result = result
        self._failure: BaseException | None = None
        # A call that ran in its caller's thread is over: making nothing to wait for is a good part of a small call's cost.
        self._ended = _ENDED if has_ended else threading.Event()
        self._signal: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = _SHARED if has_ended else threading.Lock()

    def end(self, failure: BaseException | None) -> None:
        """Tell whoever waits."""
        with self._lock:
            self._failure = failure
            self._ended.set()
            signal = self._signal
        if signal is not None:
            signal.set_result(None)

    def _give(self, _: torch.futures.Future[None]) -> list[Any]:
        if self._failure is not None:
            raise self._failure
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has ended."""
        seconds = None if timeout is None else timeout.total_seconds()
        if not self._ended.wait(seconds if seconds and seconds > 0 else None):
            raise TimedOut(f"a collective has not ended in {seconds:g} s", fix="wait longer")
        if self._failure is not None:
            raise self._failure
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the tensors that the call fills; a failure arrives as a RuntimeError with its text.

        An exception set on a future from Python is a mere value to C++ (DDP would take it for gradients and crash); one raised by a
        callback is an error on both sides.
        """
        with self._lock:
            is_new = self._future is None
            if self._future is None:
                self._signal = torch.futures.Future()
                self._future = self._signal.then(self._give)
            future, signal, has_ended = self._future, self._signal, self._ended.is_set()
        if is_new and has_ended and signal is not None:
            signal.set_result(None)
        return future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._failure is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._failure

    def result(self) -> list[Any]:
        """The tensors that the call fills."""
        return self._result

    def synchronize(self) -> None:
        """Nothing remains to be waited for on a CPU but the call itself."""
        self.wait()


class Turns:
    """One call at a time, first come first served."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()
        self._count_lock = threading.Lock()
        self._is_idle = threading.Condition(self._count_lock)
        self._num_waiting = 0
        self._queue: queue.SimpleQueue[tuple[Job, ArgosyWork] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a call made now would have to wait for its turn."""
        return self._num_waiting > 0

    def take(self, job: Job, result: list[Any], *, is_async: bool) -> ArgosyWork:
        """Run a job when its turn has come; the work is already done for a caller that waits anyway."""
        if is_async or self._must_queue():
            work = ArgosyWork(result)
            self._enqueue(job, work)
            if not is_async:
                work.wait()
            return work
        try:
            with self._turn:
                job()
        finally:
            self._leave()
        return ArgosyWork(result, has_ended=True)

    def _must_queue(self) -> bool:
        """Claim the turn if nobody waits for it."""
        with self._count_lock:
            if self._num_waiting:
                return True
            self._refuse_when_closed()
            self._num_waiting = 1
            return False

    def _leave(self) -> None:
        with self._count_lock:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._is_idle.notify_all()

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise ConfigError(
                f"process group {self._name} has been shut down", fix="make a new process group"
            )

    def _enqueue(self, job: Job, work: ArgosyWork) -> None:
        with self._count_lock:
            self._refuse_when_closed()
            self._num_waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name=f"argosy-{self._name}", daemon=True
                )
                self._thread.start()
            self._queue.put((job, work))

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            job, work = entry
            failure: BaseException | None = None
            try:
                with self._turn:
                    job()
            except Exception as raised:  # noqa: BLE001 - a thread's entry point: the failure belongs to whoever waits
                failure = raised
            self._leave()
            work.end(failure)
            del entry, job, work

    def close(self) -> bool:
        """Let what was begun end, in whichever thread, then end the group's own; whether all has ended within a few seconds."""
        with self._count_lock:
            if not self._is_closed:
                self._queue.put(None)
            self._is_closed = True
            thread = self._thread
            is_idle = self._is_idle.wait_for(lambda: not self._num_waiting, _CLOSE_SECONDS)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS if is_idle else 0)
        return is_idle
