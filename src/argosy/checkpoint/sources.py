"""Where the block writer gets its bytes, and memory that is already laid out as the files are.

`StagedSource` serves a snapshot, `LentSource` memory that was lent, `ImageSource` files as they are to be; tensors wherever they lie are gathered by gathering.py. Nothing here touches a disk
or decides who writes what. No torch: the writer process uses it.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

import numpy as np

from argosy.checkpoint.checksums import Piece
from argosy.checkpoint.headers import ALIGNMENT
from argosy.checkpoint.layouts import FileImage, Image, Slot
from argosy.checkpoint.ranges import runs_of_box
from argosy.checkpoint.shares import HEADER, Duty, block_range

Run = tuple[int, int]
"""Bytes [start, stop) of a file."""


class Source(Protocol):
    """Where the block writer gets its bytes."""

    def view(self, duty: Duty) -> int | None:
        """The address of a whole block that lies in memory as in the file; None when it must be gathered."""

    def pieces(self, duty: Duty) -> list[Piece] | None:
        """The memory of which a whole block is made, in the file's order; None when there is more to do than to copy it."""

    def fill(self, duty: Duty, address: int) -> list[Run]:
        """Gather a duty's bytes at an address; the runs of the file that they are."""

    def tensors_in(self, duty: Duty) -> list[str]:
        """Names, for errors."""


class ImageSource:
    """Memory laid out as the files: one address per file, headers included."""

    def __init__(self, image: Image, addresses: Sequence[int]) -> None:
        self._image = image
        self._addresses = addresses

    def view(self, duty: Duty) -> int | None:
        """Always there."""
        return self._addresses[duty.file] + duty.start if duty.fragments is None else None

    def pieces(self, duty: Duty) -> list[Piece] | None:
        """Whole blocks need not be gathered."""
        return None

    def fill(self, duty: Duty, address: int) -> list[Run]:
        """Copies the fragments' runs."""
        runs = runs_of_duty(self._image.files[duty.file], duty)
        for start, stop in runs:
            source = self._addresses[duty.file] + start
            ctypes.memmove(address + start - duty.start, source, stop - start)
        return runs

    def tensors_in(self, duty: Duty) -> list[str]:
        """Names, for errors."""
        return tensors_in(self._image.files[duty.file], duty.start, duty.stop)


class ReadSource(ABC):
    """Blocks that are read from elsewhere as they are asked for, one tensor's stretch after another."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._starts = [[slot.offset for slot in file.slots] for file in image.files]

    def view(self, duty: Duty) -> int | None:
        """Never in memory."""
        return None

    def pieces(self, duty: Duty) -> list[Piece] | None:
        """Never in memory."""
        return None

    def fill(self, duty: Duty, address: int) -> list[Run]:
        """Read what lies in the block."""
        file = self._image.files[duty.file]
        if duty.start < len(file.header):
            header = file.header[duty.start : duty.stop]
            ctypes.memmove(address, header, len(header))
        for slot in file.slots[self._first(duty) :]:
            if slot.offset >= duty.stop:
                break
            first, last = block_range(slot, duty.start, duty.stop)
            if first < last:
                at = address + slot.offset + first * slot.item_bytes - duty.start
                self._read(slot, first, last, at)
        return [(duty.start, duty.stop)]

    def tensors_in(self, duty: Duty) -> list[str]:
        """Names, for errors."""
        return tensors_in(self._image.files[duty.file], duty.start, duty.stop)

    def _first(self, duty: Duty) -> int:
        """Number of the first slot that may have bytes in the block."""
        return max(0, bisect_right(self._starts[duty.file], duty.start) - 1)

    @abstractmethod
    def _read(self, slot: Slot, first: int, last: int, address: int) -> None:
        """Bring elements [first, last) of a tensor to an address."""


class LentSource(ReadSource):
    """Tensors that each lie whole and row-major somewhere in memory that nobody writes meanwhile."""

    def __init__(self, image: Image, addresses: Mapping[str, int]) -> None:
        super().__init__(image)
        self._addresses = addresses

    def view(self, duty: Duty) -> int | None:
        """Only a block inside one tensor whose memory is aligned as the file's is."""
        file = self._image.files[duty.file]
        if duty.start < len(file.header):
            return None
        slot = file.slots[self._first(duty)]
        address = self._addresses[slot.name] + duty.start - slot.offset
        return address if duty.stop <= slot.stop and not address % ALIGNMENT else None

    def pieces(self, duty: Duty) -> list[Piece] | None:
        """Of every block."""
        file = self._image.files[duty.file]
        return pieces_of(file, duty, self._first(duty), lambda slot: self._addresses[slot.name])

    def _read(self, slot: Slot, first: int, last: int, address: int) -> None:
        size = slot.item_bytes
        source = self._addresses[slot.name] + first * size
        ctypes.memmove(address, source, (last - first) * size)


class StagedSource:
    """Memory in which the blocks of some duties lie one after another; each has what the process must write of it."""

    def __init__(
        self, image: Image, duties: Sequence[Duty], places: Sequence[int], address: int
    ) -> None:
        self._image = image
        self._addresses = {
            (duty.file, duty.start): address + place
            for duty, place in zip(duties, places, strict=True)
        }

    def view(self, duty: Duty) -> int | None:
        """Whole blocks are there as they are."""
        return self._addresses[duty.file, duty.start] if duty.fragments is None else None

    def pieces(self, duty: Duty) -> list[Piece] | None:
        """Whole blocks need not be gathered."""
        return None

    def fill(self, duty: Duty, address: int) -> list[Run]:
        """Copies the fragments' runs."""
        runs = runs_of_duty(self._image.files[duty.file], duty)
        base = self._addresses[duty.file, duty.start]
        for start, stop in runs:
            low = start - duty.start
            ctypes.memmove(address + low, base + low, stop - start)
        return runs

    def tensors_in(self, duty: Duty) -> list[str]:
        """Names, for errors."""
        return tensors_in(self._image.files[duty.file], duty.start, duty.stop)


def pieces_of(
    file: FileImage, duty: Duty, first_slot: int, address_of: Callable[[Slot], int | None]
) -> list[Piece] | None:
    """The header's bytes and the tensors' of which a whole block is made, in the file's order; None when one of them has no address. The image keeps the header alive."""
    found: list[Piece] = []
    if duty.start < len(file.header):
        header = np.frombuffer(file.header, dtype=np.uint8)[duty.start : duty.stop]
        found.append((header.ctypes.data, header.size))
    for slot in islice(file.slots, first_slot, None):
        if slot.offset >= duty.stop:
            break
        first, last = block_range(slot, duty.start, duty.stop)
        if first >= last:
            continue
        base = address_of(slot)
        if base is None:
            return None
        found.append((base + first * slot.item_bytes, (last - first) * slot.item_bytes))
    return found


def tensors_in(file: FileImage, start: int, stop: int) -> list[str]:
    """Names of the tensors of which a stretch of a file has bytes."""
    return [one.name for one in file.slots if one.offset < stop and one.stop > start]


def runs_of_duty(file: FileImage, duty: Duty) -> list[Run]:
    """The runs of the file that a duty's bytes are, neighbours joined."""
    if duty.fragments is None:
        return [(duty.start, duty.stop)]
    found: list[Run] = []
    for fragment in duty.fragments:
        if fragment.slot == HEADER:
            start = fragment.box.offsets[0]
            found.append((start, start + fragment.box.sizes[0]))
            continue
        slot = file.slots[fragment.slot]
        starts, length = runs_of_box(slot.shape, fragment.box)
        size = slot.item_bytes
        found += [
            (slot.offset + at * size, slot.offset + (at + length) * size) for at in starts.tolist()
        ]
    joined: list[Run] = []
    for start, stop in sorted(found):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
