"""The shared words of an exchange: 64 bits each, loaded, stored and swapped with the orderings that the protocol needs.

One word counts progress: it is raised after every event, and whoever waits sleeps on it. Waits are bounded by a deadline and by the
lives of the watched peers, and look at their condition again at short intervals: an event whose author died before he could tell is seen all the same.
Used by headers.py, versions.py and exchange.py; knows nothing of what the words mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from argosy.errors import PeerLost, TimedOut
from argosy.move import futexes, waits
from argosy.native import loader

Numbers = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
_LOOK_SECONDS = 0.05


class Memory:
    """Words of one region of shared memory, by byte offset."""

    def __init__(self, region: torch.Tensor, descriptor: int) -> None:
        self.region = region
        self._descriptor = descriptor
        self._address = waits.checked(region.data_ptr(), 8)
        self._bytes = region.numpy()
        native = loader.quick()
        # Found once: a step loads and stores a few hundred words.
        self._load = futexes.load if native is None else native.ag_load
        self._store = futexes.store if native is None else native.ag_store

    def load(self, offset: int) -> int:
        """Acquire: what was written before the word was stored is seen after this."""
        found: int = self._load(self._address + offset)
        return found

    def store(self, offset: int, value: int) -> None:
        """Release: what was written before this is seen by whoever loads the word."""
        self._store(self._address + offset, value)

    def store_all(self, words: Numbers, places: Places, values: Numbers | np.uint64) -> None:
        """Release of some words of a view, in any order. For words that say nothing while half of one is written."""
        waits.fence()
        words[places] = values

    def swap(self, offset: int, expected: int, desired: int) -> bool:
        """Compare-and-swap; whether it was done. A word that is swapped is never stored."""
        return waits.compare_and_swap(
            self._address + offset, expected, desired, descriptor=self._descriptor
        )

    def numbers(self, offset: int, count: int) -> Numbers:
        """A live view of words, without any ordering: to look for what is then loaded properly."""
        return self._bytes[offset : offset + 8 * count].view(np.uint64)

    @property
    def bytes(self) -> memoryview:
        """All of it, without any ordering."""
        return self._bytes.data

    def address_of(self, offset: int) -> int:
        """Address in this process."""
        return self._address + offset


class Progress:
    """The word that counts events, and the waits for them."""

    def __init__(self, memory: Memory, offset: int) -> None:
        self._memory = memory
        self._offset = offset
        self._address = memory.address_of(offset)
        self._peers: waits.Peers | None = None
        self.interrupt: Callable[[], None] | None = None
        """Called whenever a wait looks at its condition in vain; ends the wait by raising."""
        self.num_waits = 0
        self.waited_seconds = 0.0

    def watch(self, members: Mapping[int, int]) -> None:
        """From now on waits end with PeerLost when one of these ranks ends; values are process descriptors, -1 for this process."""
        self._peers = waits.Peers(list(members.values()), ranks=list(members))

    def tell(self) -> None:
        """Something has happened: wake all who wait. Also a full fence."""
        memory, offset = self._memory, self._offset
        while True:
            seen = memory.load(offset)
            if memory.swap(offset, seen, (seen + 1) & ((1 << 64) - 1)):
                break
        waits.wake(self._address)

    def fence(self) -> None:
        """Reads and writes before this are done before those after it."""
        waits.fence()

    def wait(
        self, condition: Callable[[], bool], deadline: float, explain: Callable[[], TimedOut]
    ) -> None:
        """Return when the condition holds; PeerLost when a watched rank has ended first, `explain()` at the deadline."""
        # Read before the condition is: nobody sleeps through an event that it has not seen.
        seen = self._memory.load(self._offset)
        if condition():
            return
        self.num_waits += 1
        started = time.monotonic()
        try:
            while True:
                self._sleep(seen, condition, deadline, explain)
                seen = self._memory.load(self._offset)
                if condition():
                    return
        finally:
            self.waited_seconds += time.monotonic() - started

    def sleep(self, deadline: float) -> None:
        """Until the next event or look, whatever it is; TimedOut when the deadline has passed."""
        looks = iter((False, True))
        self.wait(
            lambda: next(looks, True), deadline, lambda: TimedOut("nothing has happened in time")
        )

    def _sleep(
        self,
        seen: int,
        condition: Callable[[], bool],
        deadline: float,
        explain: Callable[[], TimedOut],
    ) -> None:
        """Until there is another event than those that were counted, or it is time to look; raises what ends the wait."""
        if self.interrupt is not None:
            self.interrupt()
        now = time.monotonic()
        if now >= deadline:
            raise explain()
        try:
            # The low half of the word (little-endian) is what sleepers sleep on.
            waits.wait(
                self._address,
                (seen + 1) & 0xFFFFFFFF,
                peers=self._peers,
                deadline=min(deadline, now + _LOOK_SECONDS),
            )
        except TimedOut:
            pass  # the condition decides, not the clock of one slice
        except PeerLost as lost:
            # Its last act may have been what was waited for.
            if not condition():
                raise PeerLost(lost.rank, str(explain().what))
