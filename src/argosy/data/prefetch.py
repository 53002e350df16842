"""Prefetch: batches computed ahead in a background thread.

The trainer says which lanes it will want (`expect`) and takes them (`take`); what is not ready is computed at once, so prefetch changes time
and nothing else. At most `depth` batches wait. A feed that uses the process's random generators is computed in the caller's thread:
seeding them behind a running model would change its dropout.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol, TypeAlias

from argosy.data.batches import Batch

Place: TypeAlias = tuple[int, int]


class Batches(Protocol):
    """A feed, or anything that computes batches as purely."""

    def batch(self, index: int, lane: int) -> Batch:
        """Lane `lane` of batch `index`."""


class Ahead:
    """`expect([(index, lane), …])`, then `take(index, lane)`; `close()` or a `with` block ends the thread."""

    def __init__(self, feed: Batches, depth: int = 2) -> None:
        self._feed = feed
        self._depth = max(0 if getattr(feed, "has_generators", False) else depth, 0)
        self._num_taken = self._num_ready = 0
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._wanted: deque[Place] = deque()
        self._expected: set[Place] = set()
        self._ready: dict[Place, Batch | BaseException] = {}
        self._working_on: Place | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def expect(self, places: Iterable[Place]) -> None:
        """What will be taken from now on, in this order; replaces what was expected before."""
        if self._depth == 0 or self._is_closed:
            return
        if os.getpid() != self._pid:
            # Threads and what they held do not follow into a forked process.
            self._begin()
        listed = list(dict.fromkeys(places))
        with self._changed:
            self._expected = set(listed)
            for place in set(self._ready) - self._expected:
                del self._ready[place]
            self._wanted = deque(
                place for place in listed if place not in self._ready and place != self._working_on
            )
            if self._thread is None and self._wanted:
                self._thread = threading.Thread(target=self._work, name="argosy-ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self, index: int, lane: int) -> Batch:
        """The batch, ready or not; raises here what was raised while it was computed."""
        place = (index, lane)
        self._num_taken += 1
        if os.getpid() == self._pid and self._thread is not None:
            with self._changed:
                while self._working_on == place and not self._is_closed:
                    self._changed.wait()
                done = self._ready.pop(place, None)
                self._expected.discard(place)
                if place in self._wanted:
                    self._wanted.remove(place)
                self._changed.notify_all()
            if isinstance(done, BaseException):
                raise done
            if done is not None:
                self._num_ready += 1
                return done
        return self._feed.batch(index, lane)

    def statistics(self) -> dict[str, int]:
        """Batches taken, how many of them had been computed ahead, and how many wait now."""
        waiting = len(self._ready)
        return {"taken": self._num_taken, "ready": self._num_ready, "waiting": waiting}

    def close(self) -> None:
        """End the thread after the batch it is computing; `take` goes on working without it."""
        thread = self._thread
        if os.getpid() == self._pid:
            with self._changed:
                self._is_closed = True
                self._wanted.clear()
                self._ready.clear()
                self._changed.notify_all()
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        self._thread = None
        self._is_closed = True

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (place := self._next()) is not None:
            try:
                done: Batch | BaseException = self._feed.batch(*place)
            # Whatever it is belongs to the thread that takes this batch.
            except BaseException as error:  # noqa: BLE001
                done = error
            with self._changed:
                self._working_on = None
                if place in self._expected and not self._is_closed:
                    self._ready[place] = done
                self._changed.notify_all()

    def _next(self) -> Place | None:
        with self._changed:
            while not self._is_closed and (not self._wanted or len(self._ready) >= self._depth):
                self._changed.wait()
            if self._is_closed:
                return None
            self._working_on = self._wanted.popleft()
            return self._working_on
