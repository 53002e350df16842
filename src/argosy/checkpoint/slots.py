"""A slot: shared memory for one snapshot, a control page and then blocks laid out as in the files.

The trainer makes it, copies into it and tells the writer process its descriptor; both see the same pages, and they live until both let go. The sequence
in the control page is odd while a copy is under way: who reads looks at it before and after, so that half a copy is never taken for a whole one. No torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Sequence

from argosy.checkpoint.directio import ALIGNMENT
from argosy.checkpoint.shares import Duty
from argosy.errors import ArenaGone
from argosy.move import hostmemory
from argosy.native import loader

_CONTROL_BYTES = 4096
_MAGIC = 0x41524753_4C4F5431
_WORD = struct.Struct("<Q")
_MAGIC_AT, _SEQUENCE_AT, _STEP_AT = 0, 64, 128


class SnapshotSlot:
    """One snapshot's memory as this process has it mapped."""

    def __init__(self, descriptor: int, *, is_writable: bool) -> None:
        size = os.fstat(descriptor).st_size
        if size <= _CONTROL_BYTES:
            raise ArenaGone(f"a snapshot's memory of {size} bytes")
        self.descriptor = descriptor
        self.num_bytes = size - _CONTROL_BYTES
        # Also the reader's: ctypes gives addresses of writable maps alone. It never stores.
        self._map = mmap.mmap(descriptor, size)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(self._anchor)
        self.address = self._base + _CONTROL_BYTES
        if is_writable:
            hostmemory.populate(self._map, is_writing=True)
            self._put(_MAGIC_AT, _MAGIC)
        elif self._get(_MAGIC_AT) != _MAGIC:
            raise ArenaGone("this memory is no snapshot's")

    @classmethod
    def create(cls, num_bytes: int) -> SnapshotSlot:
        """New memory, all of it taken now; NoRoom when the host cannot give it."""
        descriptor = os.memfd_create("argosy-snapshot", os.MFD_CLOEXEC)
        try:
            size = _CONTROL_BYTES + max(num_bytes, 1)
            hostmemory.reserve(descriptor, hostmemory.round_up(size), "a snapshot of the state")
            return cls(descriptor, is_writable=True)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def sequence(self) -> int:
        """Odd while a copy is under way, another number after each."""
        return self._get(_SEQUENCE_AT)

    @property
    def step(self) -> int:
        """Of the copy that is or was made."""
        return self._get(_STEP_AT)

    def begin(self, step: int) -> None:
        """From now on what is here is no snapshot."""
        self._put(_SEQUENCE_AT, self.sequence | 1)
        self._put(_STEP_AT, step)

    def finish(self) -> int:
        """What is here is whole; the sequence to know it by."""
        sequence = (self.sequence | 1) + 1
        self._put(_SEQUENCE_AT, sequence)
        return sequence

    def check(self, sequence: int) -> None:
        """ArenaGone unless what is here is the whole copy that the sequence stands for."""
        found = self.sequence
        if found != sequence or found % 2:
            raise ArenaGone(
                f"the snapshot of step {self.step} was overwritten while it was saved",
                fix="save again",
            )

    def close(self) -> None:
        """Let go of it here."""
        if self.descriptor >= 0:
            del self._anchor
            self._map.close()
            os.close(self.descriptor)
            self.descriptor = -1

    def _put(self, offset: int, value: int) -> None:
        native = loader.library()
        if native is not None:
            native.ag_store(self._base + offset, value)
        else:
            _WORD.pack_into(self._map, offset, value)

    def _get(self, offset: int) -> int:
        native = loader.library()
        if native is not None:
            return int(native.ag_load(self._base + offset))
        return int(_WORD.unpack_from(self._map, offset)[0])


def places_of(duties: Sequence[Duty]) -> tuple[list[int], int]:
    """Where each duty's block begins in a slot, and how much they take together; blocks of one file follow each other as in the file."""
    places, at = [], 0
    for duty in duties:
        places.append(at)
        at += -(-(duty.stop - duty.start) // ALIGNMENT) * ALIGNMENT
    return places, at
