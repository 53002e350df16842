"""Slots: shared memory whose sequence tells half a copy from a whole one."""

import ctypes
import os

import pytest

from argosy.checkpoint.shares import Duty
from argosy.checkpoint.slots import SnapshotSlot, places_of
from argosy.errors import ArenaGone


def attached(slot):
    return SnapshotSlot(os.dup(slot.descriptor), is_writable=False)


def test_another_mapping_sees_the_bytes_and_whether_they_are_whole(path):
    slot = SnapshotSlot.create(10_000)
    other = attached(slot)
    slot.begin(7)
    ctypes.memmove(slot.address, b"half", 4)
    assert other.sequence % 2 == 1
    assert other.step == 7
    sequence = slot.finish()
    other.check(sequence)
    assert ctypes.string_at(other.address, 4) == b"half"
    other.close()
    slot.close()


def test_a_copy_that_was_cut_off_or_replaced_is_never_taken_for_the_one_before():
    slot = SnapshotSlot.create(4096)
    slot.begin(1)
    first = slot.finish()
    slot.begin(2)
    with pytest.raises(ArenaGone, match="overwritten"):
        slot.check(first)
    assert slot.finish() != first
    with pytest.raises(ArenaGone, match="overwritten"):
        slot.check(first)
    slot.begin(3)
    slot.begin(4)
    assert slot.finish() % 2 == 0
    slot.close()


def test_memory_of_something_else_is_refused():
    descriptor = os.memfd_create("other", os.MFD_CLOEXEC)
    with pytest.raises(ArenaGone):
        SnapshotSlot(descriptor, is_writable=False)
    os.ftruncate(descriptor, 8192)
    with pytest.raises(ArenaGone, match="no snapshot"):
        SnapshotSlot(descriptor, is_writable=False)
    os.close(descriptor)


def test_closing_gives_the_memory_and_the_descriptor_back():
    before = set(os.listdir("/proc/self/fd"))
    slot = SnapshotSlot.create(1 << 20)
    other = attached(slot)
    other.close()
    other.close()
    slot.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_blocks_of_one_file_follow_each_other_and_all_begin_aligned():
    block = 8 << 20
    duties = [Duty(0, 0, block), Duty(0, block, block + 100), Duty(1, 0, 5000)]
    places, num_bytes = places_of(duties)
    assert places == [0, block, block + 4096]
    assert num_bytes == block + 4096 + 8192
    assert places_of([]) == ([], 0)
