"""Saves of a state from where it lies: in memory that other processes can map, and that its owner leaves as it is until the save is over.

Nothing is copied but what lies elsewhere. The writer process maps the memory and holds what its owner holds, so that it finishes a save whose owner has died, and nobody
writes there before. The trainer's pinned versions are saved so.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from argosy.checkpoint import together
from argosy.checkpoint.deliveries import Deliveries, Delivery
from argosy.checkpoint.gathering import TensorSource
from argosy.checkpoint.handles import SaveHandle
from argosy.checkpoint.headers import ALIGNMENT
from argosy.checkpoint.layouts import FileImage, Image
from argosy.checkpoint.saving import Prepared
from argosy.checkpoint.writer.messages import Lent
from argosy.errors import NoRoom
from argosy.move import hostmemory

_LOG = logging.getLogger("argosy.checkpoint")


class Memory(NamedTuple):
    """Shared memory as this process has it mapped, from its first byte on."""

    descriptor: int
    address: int
    num_bytes: int


class Loan(NamedTuple):
    """What may be read until the save is over."""

    memories: tuple[Memory, ...]
    holds: tuple[int, ...] = ()
    """Descriptors with locks by which others see that it is being read."""


class _Place(NamedTuple):
    file: FileImage
    slot: int

    @property
    def name(self) -> str:
        return self.file.slots[self.slot].name

    @property
    def num_bytes(self) -> int:
        return self.file.slots[self.slot].num_bytes


Places = dict[str, tuple[int, int]]


def lend(
    deliveries: Deliveries, prepare: Callable[[], Prepared], handle: SaveHandle, loan: Loan
) -> None:
    """Have the writer process save from lent memory, for a process that saves alone; where there is none it is saved before this returns.

    What goes wrong once it is planned is the handle's.
    """
    one = Delivery(handle)
    one.planned(prepare())
    handle.how = "lent"
    prepared = one.prepared
    source = TensorSource(prepared.outline.image, prepared.book.entries)
    try:
        if not _hand_over(deliveries, one, source, loan):
            deliveries.durable(one, deliveries.write_here(one, source))
    except BaseException as failure:  # noqa: BLE001
        # Whatever it is belongs to whoever waits for the save.
        together.give_up(prepared.staging, deliveries.group, failure)
        deliveries.failed(one, failure)


def _hand_over(deliveries: Deliveries, one: Delivery, source: TensorSource, loan: Loan) -> bool:
    places, elsewhere = _find(one.prepared.outline.image, source, loan.memories)
    descriptors = [memory.descriptor for memory in loan.memories]
    with contextlib.ExitStack() as stack:
        if elsewhere or not descriptors:
            number = len(descriptors)
            try:
                descriptors.append(stack.enter_context(_copied(source, elsewhere, places, number)))
            except NoRoom as failure:
                _LOG.warning("step %d is written by this process: %s", one.step, failure)
                return False
        told = Lent(memories=len(descriptors), places=places)
        return deliveries.hand_over(one, told, descriptors, loan.holds)


def _find(
    image: Image, source: TensorSource, memories: Sequence[Memory]
) -> tuple[Places, list[_Place]]:
    """Where tensors lie in these memories, and which do not."""
    places: Places = {}
    elsewhere = []
    for file in image.files:
        for number, slot in enumerate(file.slots):
            address = source.address_of(slot)
            found = [
                (place, address - one.address)
                for place, one in enumerate(memories)
                if address is not None
                and 0 <= address - one.address <= one.num_bytes - slot.num_bytes
            ]
            if found or not slot.num_bytes:
                places[slot.name] = found[0] if found else (0, 0)
            else:
                elsewhere.append(_Place(file, number))
    return places, elsewhere


@contextlib.contextmanager
def _copied(
    source: TensorSource, wanted: Sequence[_Place], places: Places, number: int
) -> Iterator[int]:
    """A descriptor of new memory with copies of some tensors; their places are put down, in the memory of this number."""
    size = 0
    for one in wanted:
        places[one.name] = number, size
        size += -(-one.num_bytes // ALIGNMENT) * ALIGNMENT
    descriptor = os.memfd_create("argosy-lent", os.MFD_CLOEXEC)
    try:
        size = hostmemory.round_up(max(size, 1))
        hostmemory.reserve(descriptor, size, "tensors beside the lent ones")
        with mmap.mmap(descriptor, size) as memory:
            anchor = ctypes.c_char.from_buffer(memory)
            for one in wanted:
                source.gather(one.file, one.slot, ctypes.addressof(anchor) + places[one.name][1])
            del anchor  # it keeps the map open
        yield descriptor
    finally:
        os.close(descriptor)
