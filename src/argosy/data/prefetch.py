"""Prefetch: batches computed ahead in a background thread.

The trainer says which lanes it will want (`expect`) and takes them (`take`); what is not ready is computed at once, so prefetch changes time
and nothing else. At most `depth` batches wait. A feed that uses the process's random generators is computed in the caller's thread:
seeding them behind a running model would change its dropout. So is one whose batches take less time than two threads need to hand one over: those
of a step are made together, when it begins, while the code that makes them is warm.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol, TypeAlias

from argosy.data.batches import Batch

Place: TypeAlias = tuple[int, int]

QUICK_SECONDS = 0.0005
"""A batch that takes its caller no longer than this is not worth a thread, which costs as much in switches and waits for the interpreter."""
_FIRST_STEPS, _MOST_STEPS = 4, 1024


class Trial:
    """Whether batches are made ahead: for some steps they are, in the next one the caller makes them and takes the time.

    While they are quick he goes on; after each trial in which they were not, twice as many steps pass before another one. Pure.
    """

    def __init__(self) -> None:
        self._steps = self._left = _FIRST_STEPS
        self._is_on = False
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        """The caller has made a batch, in so much time."""
        if self._is_on:
            self._seconds.append(seconds)

    def is_ahead(self) -> bool:
        """Asked when a step begins: whether its batches are to be made ahead."""
        # Half of them, since a busy machine makes any one of them wait.
        middle = sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else QUICK_SECONDS
        if middle > QUICK_SECONDS:
            self._left, self._steps = self._steps, min(2 * self._steps, _MOST_STEPS)
        elif self._is_on:
            self._steps = _FIRST_STEPS
        self._is_on = self._left == 0
        self._left = max(self._left - 1, 0)
        self._seconds.clear()
        return not self._is_on


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
        self._trial = Trial()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._wanted: deque[Place] = deque()
        self._expected: set[Place] = set()
        self._ready: dict[Place, Batch | BaseException] = {}
        self._working_on: Place | None = None
        self._made: dict[Place, Batch] = {}
        """By the caller, for the step that begins."""
        self._is_closed = False
        self._is_idle = True
        """Nothing is wanted, made or ready: until somebody expects something the thread has no part in this."""
        self._thread: threading.Thread | None = None

    def expect(self, places: Iterable[Place]) -> None:
        """What will be taken from now on, in this order; replaces what was expected before."""
        if self._depth == 0 or self._is_closed:
            return
        if os.getpid() != self._pid:
            # Threads and what they held do not follow into a forked process.
            self._begin()
        is_ahead = self._trial.is_ahead()
        listed = list(dict.fromkeys(places))
        if self._is_idle and not is_ahead:
            self._make(listed)
            return
        self._made.clear()
        with self._changed:
            self._expected = set(listed)
            for place in set(self._ready) - self._expected:
                del self._ready[place]
            made = {*self._ready, self._working_on}
            self._wanted = deque(place for place in listed if is_ahead and place not in made)
            self._is_idle = not self._wanted and made == {None}
            if self._thread is None and self._wanted:
                self._thread = threading.Thread(target=self._work, name="argosy-ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self, index: int, lane: int) -> Batch:
        """The batch, ready or not; raises here what was raised while it was computed."""
        place = (index, lane)
        self._num_taken += 1
        made = self._made.pop(place, None)
        if made is not None:
            return made
        if not self._is_idle and os.getpid() == self._pid and self._thread is not None:
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
        return self._try(index, lane)

    def _make(self, places: list[Place]) -> None:
        """Make the batches of the first index; what cannot be made is tried again, and its error raised, where it is taken."""
        self._made = {}
        for index, lane in places:
            if index != places[0][0]:
                return
            try:
                self._made[index, lane] = self._try(index, lane)
            # Whatever it is belongs to who takes this batch.
            except Exception:  # noqa: BLE001
                return

    def _try(self, index: int, lane: int) -> Batch:
        started = time.perf_counter()
        batch = self._feed.batch(index, lane)
        self._trial.add(time.perf_counter() - started)
        return batch

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
