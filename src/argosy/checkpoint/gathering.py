"""The bytes of a checkpoint's files from tensors wherever they lie: whole or in boxes, contiguous or not.

A `Source` of the block writer. In place where a block happens to lie in memory as in the file, gathered into the writer's block otherwise.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from argosy.checkpoint.checksums import Piece
from argosy.checkpoint.entries import Entry
from argosy.checkpoint.headers import ALIGNMENT, FROM_FILE
from argosy.checkpoint.layouts import FileImage, Image, Slot
from argosy.checkpoint.ranges import boxes_of_range, flat_offset
from argosy.checkpoint.shares import HEADER, Duty, Fragment, block_range
from argosy.checkpoint.sources import Run, pieces_of, runs_of_duty, tensors_in
from argosy.move.boxes import Box, Held, row_major
from argosy.move.overlaps import NotCovered
from argosy.move.placements import dtype_of
from argosy.move.rows import copy_bytes


class TensorSource:
    """Tensors wherever they lie, whole or in boxes."""

    def __init__(self, image: Image, entries: Iterable[Entry]) -> None:
        self._image = image
        self._entries = {entry.name: entry for entry in entries}
        self._starts = [[slot.offset for slot in file.slots] for file in image.files]

    def view(self, duty: Duty) -> int | None:
        """Only a block inside one plain tensor whose memory is aligned as the file's is."""
        file = self._image.files[duty.file]
        if duty.fragments is not None or duty.start < len(file.header):
            return None
        slot = file.slots[self._first(duty)]
        base = self.address_of(slot) if duty.stop <= slot.stop else None
        if base is None or (base + duty.start - slot.offset) % ALIGNMENT:
            return None
        return base + duty.start - slot.offset

    def pieces(self, duty: Duty) -> list[Piece] | None:
        """Of a block of plain tensors."""
        if duty.fragments is not None:
            return None
        file = self._image.files[duty.file]
        return pieces_of(file, duty, self._first(duty), self.address_of)

    def fill(self, duty: Duty, address: int) -> list[Run]:
        """Gathers; bytes that are not this process's are left as they are."""
        file = self._image.files[duty.file]
        if duty.fragments is not None:
            for fragment in duty.fragments:
                self._add(file, duty, fragment, address)
            return runs_of_duty(file, duty)
        if duty.start < len(file.header):
            header = file.header[duty.start : duty.stop]
            ctypes.memmove(address, header, len(header))
        for place in range(self._first(duty), len(file.slots)):
            slot = file.slots[place]
            if slot.offset >= duty.stop:
                break
            first, last = block_range(slot, duty.start, duty.stop)
            if first >= last:
                continue
            base = self.address_of(slot)
            target = address + slot.offset + first * slot.item_bytes - duty.start
            if base is not None:
                source = base + first * slot.item_bytes
                copy_bytes(target, source, (last - first) * slot.item_bytes)
                continue
            for box in boxes_of_range(slot.shape, first, last):
                self._add(file, duty, Fragment(place, box), address)
        return [(duty.start, duty.stop)]

    def tensors_in(self, duty: Duty) -> list[str]:
        """Names, for errors."""
        return tensors_in(self._image.files[duty.file], duty.start, duty.stop)

    def _first(self, duty: Duty) -> int:
        """Number of the first slot that may have bytes in the block."""
        return max(0, bisect_right(self._starts[duty.file], duty.start) - 1)

    def address_of(self, slot: Slot) -> int | None:
        """Address of a tensor that this process holds whole and row-major."""
        entry = self._entries[slot.name]
        if len(entry.held) != 1:
            return None
        (held,) = entry.held
        if held.box.sizes != slot.shape or held.strides != row_major(slot.shape):
            return None
        if slot.box is not None and held.box != slot.box:
            return None
        buffer = entry.buffers[held.buffer]
        return buffer.data_ptr() + held.start * slot.item_bytes

    def gather(self, file: FileImage, place: int, address: int) -> None:
        """One whole tensor, row-major, at an address."""
        slot = file.slots[place]
        box = Box((0,) * len(slot.shape), slot.shape)
        self._add(file, Duty(0, slot.offset, slot.stop), Fragment(place, box), address)

    def _add(self, file: FileImage, duty: Duty, fragment: Fragment, address: int) -> None:
        if fragment.slot == HEADER:
            start = fragment.box.offsets[0]
            header = file.header[start : start + fragment.box.sizes[0]]
            ctypes.memmove(address + start - duty.start, header, len(header))
            return
        slot = file.slots[fragment.slot]
        entry = self._entries[slot.name]
        rest = [_moved(fragment.box, slot.box, 1)]
        for held in entry.held:
            for box in rest:
                cut = box.intersect(held.box)
                if cut is not None:
                    _copy(slot, cut, entry.buffers[held.buffer], held, address - duty.start)
            rest = [piece for box in rest for piece in box.subtract(held.box)]
            if not rest:
                return
        raise NotCovered(slot.name, rest[0])


def _copy(slot: Slot, box: Box, buffer: torch.Tensor, held: Held, origin: int) -> None:
    """One box from its owner's memory to where the file's byte 0 would be at `origin`."""
    dtype = dtype_of(FROM_FILE[slot.dtype])
    source = buffer.view(-1) if buffer.is_contiguous() else buffer
    taken = source.as_strided(
        box.sizes, held.strides, buffer.storage_offset() + held.at(box.offsets)
    )
    inside = _moved(box, slot.box, -1)
    first = origin + slot.offset + flat_offset(slot.shape, inside.offsets) * slot.item_bytes
    target = tensor_at(first, box.sizes, row_major(slot.shape), dtype)
    target.copy_(taken)


def _moved(box: Box, shard: Box | None, sign: int) -> Box:
    """Between the coordinates of a shard and the tensor's."""
    if shard is None:
        return box
    offsets = tuple(at + sign * by for at, by in zip(box.offsets, shard.offsets, strict=True))
    return Box(offsets, box.sizes)


def tensor_at(
    address: int, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor over memory that the caller keeps alive; it must not outlive the call that made it."""
    span = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    memory = (ctypes.c_uint8 * (span * dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat.as_strided(tuple(sizes), tuple(strides))
