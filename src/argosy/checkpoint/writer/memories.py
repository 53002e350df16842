"""The memory that a job of the writer process reads: a slot with a snapshot, or what a rank has lent.

Given by serving.py, used by jobs.py. Nothing here is written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

from argosy.checkpoint.layouts import Image
from argosy.checkpoint.shares import Duty
from argosy.checkpoint.slots import SnapshotSlot
from argosy.checkpoint.sources import LentSource, Source, StagedSource
from argosy.checkpoint.writer.messages import Lent, Staged
from argosy.errors import ProtocolError


class JobMemory(Protocol):
    """Where a job has its bytes."""

    def source(self, image: Image, duties: Sequence[Duty]) -> Source:
        """As the block writer reads it."""

    def check(self) -> None:
        """ArenaGone when it is not what was to be saved."""

    def close(self) -> None:
        """The job is over."""


class StagedMemory:
    """A snapshot in a slot, which is the rank's."""

    def __init__(self, told: Staged, slot: SnapshotSlot) -> None:
        self._told = told
        self._slot = slot

    def source(self, image: Image, duties: Sequence[Duty]) -> Source:
        """Laid out by duties."""
        return StagedSource(image, duties, self._told.places, self._slot.address)

    def check(self) -> None:
        """Its sequence is another one when it was overwritten."""
        self._slot.check(self._told.sequence)

    def close(self) -> None:
        """It is used again."""


class LentMemory:
    """Memory that whoever has lent it leaves as it is; mapped for one job."""

    def __init__(self, told: Lent, descriptors: Sequence[int]) -> None:
        """The descriptors are this one's from now on, whatever happens."""
        self._told = told
        self._maps: list[mmap.mmap] = []
        self._anchors: list[ctypes.c_char] = []
        try:
            for descriptor in descriptors:
                # ctypes gives addresses of writable maps alone.
                self._maps.append(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
                self._anchors.append(ctypes.c_char.from_buffer(self._maps[-1]))
        except (OSError, ValueError) as failure:
            self.close()
            raise ProtocolError(f"lent memory cannot be mapped: {failure}", fix="save again")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def source(self, image: Image, duties: Sequence[Duty]) -> Source:
        """Each tensor where it lies."""
        addresses = {}
        for slot in (one for file in image.files for one in file.slots):
            number, offset = self._told.places[slot.name]
            if not 0 <= offset <= len(self._maps[number]) - slot.num_bytes:
                raise ProtocolError(f"{slot.name} does not lie in the memory that was lent for it")
            addresses[slot.name] = ctypes.addressof(self._anchors[number]) + offset
        return LentSource(image, addresses)

    def check(self) -> None:
        """Nobody writes it."""

    def close(self) -> None:
        """Let go of it."""
        self._anchors.clear()  # first: they keep the maps open
        while self._maps:
            self._maps.pop().close()
