"""A window: a few blocks of shared memory through which one process shows others what it has read and checked.

The process that reads makes it and the others map it; its pages go with the last of them, however they end. A block is filled again when everybody has
taken it. Who dies is waited for no longer, who stands still for a few seconds: a block that is overwritten under a slow taker is noticed by its number. No torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from argosy.checkpoint.directio import ALIGNMENT
from argosy.checkpoint.sharing import Measure
from argosy.errors import ArenaGone
from argosy.move import hostmemory, waits

STILL_SECONDS = 5.0
"""How long one that lives may stand still before it is left behind."""

_WORD = 8
_NONCE, _ENDED, _HOLDS = 0, 1, 2
_ALL = 1 << 62


@dataclass(frozen=True)
class Block:
    """One block of a window, to be filled."""

    memory: memoryview
    address: int


class Window:
    """Blocks and words as this process has them mapped; stretches are known by their numbers, and use the blocks in turn."""

    def __init__(self, descriptor: int, measure: Measure) -> None:
        self.descriptor = descriptor
        self._measure = measure
        if os.fstat(descriptor).st_size != size_of(measure):
            raise ArenaGone("this memory is no window of that size")
        self._map = mmap.mmap(descriptor, size_of(measure))
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(self._anchor)
        self._lives: dict[int, int] = {}
        self._left: set[int] = set()

    @classmethod
    def create(cls, measure: Measure) -> Window:
        """New memory; NoRoom when the host cannot give it."""
        descriptor = os.memfd_create("argosy-window", os.MFD_CLOEXEC)
        try:
            hostmemory.reserve(descriptor, size_of(measure), "a window for other ranks")
            window = cls(descriptor, measure)
        except BaseException:
            os.close(descriptor)
            raise
        window._put(_NONCE, secrets.randbits(62) | 1)
        return window

    @classmethod
    def open(cls, pid: int, descriptor: int, nonce: int, measure: Measure) -> Window:
        """The window of another process; ArenaGone when it is not there any more."""
        try:
            own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as failure:
            raise ArenaGone(f"the window of process {pid} cannot be opened: {failure}")
        try:
            window = cls(own, measure)
        except BaseException:
            os.close(own)
            raise
        if window.nonce != nonce:
            window.close()
            raise ArenaGone(f"process {pid} has another window by now")
        return window

    @property
    def nonce(self) -> int:
        """What it is known by."""
        return self._get(_NONCE)

    def watch(self, pids: Mapping[int, int]) -> None:
        """From now on the ends of these processes, by place, end waits for them."""
        for place, pid in pids.items():
            try:
                self._lives[place] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._left.add(place)
            except OSError:
                pass  # a kernel that cannot: then it is left behind when it stands still

    @property
    def num_blocks(self) -> int:
        """How many stretches it holds at once."""
        return self._measure.num_blocks

    def begin(self, index: int) -> Block:
        """The block for a stretch; all that wanted what was there before must have taken it (`wait_taken`)."""
        self._put(self._holds(index), 0)
        # The number must be gone before the first new byte is there.
        waits.fence()
        start = self._start(index)
        memory = memoryview(self._map)[start : start + self._measure.block_bytes]
        return Block(memory, self._base + start)

    def publish(self, index: int) -> None:
        """What is in the block has been checked: show it."""
        self._put(self._holds(index), index + 1)

    def wait_taken(self, index: int, own: int, takers: Sequence[int]) -> None:
        """Until this process, at place `own`, is through with a stretch, and the others have taken it, have ended, or have stood still too long."""
        word = self._taken(own, index)
        # Without an end: a thread of this process is reading it, however slow the disk is, and the others' time begins when it is there.
        self._wait(lambda: self._get(word) > index, own, time.monotonic)
        for place in takers:
            if place != own and not self._wait_taken(index, place):
                self._left.add(place)

    def _wait_taken(self, index: int, place: int) -> bool:
        word = self._taken(place, index)
        words = [self._taken(place, block) for block in range(self._measure.num_blocks)]
        return self._wait(
            lambda: self._get(word) > index, place, lambda: list(map(self._get, words))
        )

    def find(self, index: int, reader: int) -> int | None:
        """The address of a stretch, once it is there; None when its reader will not bring it."""
        word = self._holds(index)
        words = [self._holds(block) for block in range(self._measure.num_blocks)]

        def is_there() -> bool:
            return self._get(word) > index or bool(self._get(_ENDED))

        if not self._wait(is_there, reader, lambda: list(map(self._get, words))):
            self._left.add(reader)
        return self._base + self._start(index) if self.is_held(index) else None

    def is_held(self, index: int) -> bool:
        """Whether a stretch is there now; asked again after it was copied."""
        waits.fence()
        return self._get(self._holds(index)) == index + 1

    def take(self, index: int, place: int) -> None:
        """It is not needed any more by the one at this place."""
        self._put(self._taken(place, index), index + 1)

    def leave(self, place: int) -> None:
        """The one at this place takes nothing more."""
        for block in range(self._measure.num_blocks):
            self._put(self._taken(place, block), _ALL)

    def end(self) -> None:
        """Nothing more will be shown."""
        self._put(_ENDED, 1)

    def close(self) -> None:
        """Let go of it here."""
        if self.descriptor >= 0:
            for life in self._lives.values():
                os.close(life)
            self._lives.clear()
            del self._anchor
            try:
                self._map.close()
            except BufferError:
                pass  # a block is in the frames of an error that is on its way: the map goes with it
            os.close(self.descriptor)
            self.descriptor = -1

    def _wait(
        self, condition: Callable[[], bool], place: int, progress: Callable[[], object]
    ) -> bool:
        """Whether the condition holds before the one at a place has ended or stood still."""
        pause, seen = 0.00005, progress()
        deadline = time.monotonic() + STILL_SECONDS
        while not condition():
            if place in self._left:
                return False
            if self._has_ended(place):
                # Its last act may have been what was waited for.
                return condition()
            now = progress()
            if now != seen:
                seen, deadline = now, time.monotonic() + STILL_SECONDS
            elif time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(0.002, pause * 1.5)
        return True

    def _has_ended(self, place: int) -> bool:
        life = self._lives.get(place)
        if life is None:
            return False
        poll = select.poll()
        poll.register(life, select.POLLIN)
        return bool(poll.poll(0))

    def _start(self, index: int) -> int:
        measure = self._measure
        return _control_bytes(measure) + index % measure.num_blocks * measure.block_bytes

    def _holds(self, index: int) -> int:
        return _HOLDS + index % self._measure.num_blocks

    def _taken(self, place: int, index: int) -> int:
        measure = self._measure
        row = 1 + measure.places.index(place)
        return _HOLDS + row * measure.num_blocks + index % measure.num_blocks

    def _put(self, word: int, value: int) -> None:
        waits.store(self._base + word * _WORD, value)

    def _get(self, word: int) -> int:
        return waits.load(self._base + word * _WORD)


def size_of(measure: Measure) -> int:
    """Bytes of a window."""
    return _control_bytes(measure) + measure.num_blocks * measure.block_bytes


def _control_bytes(measure: Measure) -> int:
    """Before the blocks: what is in each, and for each place what it has taken."""
    words = _HOLDS + measure.num_blocks * (1 + len(measure.places))
    return -(-words * _WORD // ALIGNMENT) * ALIGNMENT
