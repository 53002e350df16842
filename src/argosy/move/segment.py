"""The shared segment of a group: one memfd with a header, a page per rank and two slots per rank.

The layout is that of native/collectives.h, declared here once more for ctypes. `Segment` makes, opens, checks and frees it;
nativeroute.py and torchroute.py work in it. Nothing here waits for another process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import struct
import weakref

import torch

from argosy.errors import ArenaGone
from argosy.move import hostmemory, mapping, waits
from argosy.native import loader

VERSION = 1
MAGIC = 0x00595F534F475241
PAGE = 4096
MAX_RANKS = 256
REASON_SHIFT = 20
AGAIN = 16
TEXT_BYTES = 3840

# Offsets of words in the header page and in a rank's page.
BROKEN, ARRIVALS, GENERATION = 64, 128, 192
SAID, ARRIVED, TEXT_LENGTH, TEXT = 0, 64, 128, 192
_DESCRIPTOR_BYTES = 32
_HEADER = struct.Struct("<QIIQQIIQ")


class GroupStruct(ctypes.Structure):
    """ag_group."""

    _fields_ = (
        ("segment", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("epoch", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("stage_bytes", ctypes.c_int64),
        ("small_bytes", ctypes.c_int64),
        ("chunk_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("peers", loader.CPeers),
        ("stalls", ctypes.c_int64),
        ("stalled_ns", ctypes.c_int64),
    )


class CallStruct(ctypes.Structure):
    """ag_call."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("operation", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("what", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("element_bytes", ctypes.c_int64),
        ("factor", ctypes.c_double),
        ("deadline_ns", ctypes.c_int64),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("input_bytes", ctypes.c_void_p),
        ("output_bytes", ctypes.c_void_p),
        ("step", ctypes.c_int64),
        ("largest", ctypes.c_int64),
        ("is_waiting", ctypes.c_int32),
        ("pad", ctypes.c_int32),
    )


_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ag_collectives_layout": (ctypes.c_int64, (ctypes.c_int32,)),
    "ag_collective": (ctypes.c_int32, (ctypes.c_void_p, ctypes.c_void_p)),
    "ag_group_break": (ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_uint32)),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native code with its collectives declared, or None where it is missing, off or of another layout."""
    opened = loader.library()
    if opened is None:
        return None
    try:
        loader.declare(opened, _FUNCTIONS)
    except AttributeError:
        return None
    here = [ctypes.sizeof(GroupStruct), ctypes.sizeof(CallStruct)]
    return opened if here == [opened.ag_collectives_layout(which) for which in range(2)] else None


class Segment:
    """One mapped segment of a group of `num_ranks` processes of one host."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._map: mapping.Mapping | None = mapping.Mapping(
            descriptor, size, is_private=False, is_prefaulted=True
        )
        self.address = self._map.address
        self.num_ranks = 0
        self.slot_bytes = 0
        # A group that nobody destroys still gives its descriptor back.
        self._closer = weakref.finalize(self, os.close, descriptor)
        self._closer.atexit = False

    @classmethod
    def create(cls, num_ranks: int, slot_bytes: int, *, is_native: bool) -> Segment:
        """A new one; its descriptor is what the other ranks open."""
        slot_bytes = hostmemory.round_up(slot_bytes)
        size = PAGE * (1 + num_ranks) + 2 * num_ranks * slot_bytes
        descriptor = os.memfd_create("argosy-group", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            hostmemory.reserve(descriptor, size, f"a group of {num_ranks} ranks")
            segment = cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        header = (0, VERSION, VERSION, size, secrets.randbits(64), num_ranks, is_native, slot_bytes)
        memory = segment.memory
        memory[: _HEADER.size] = _HEADER.pack(*header)
        memory[:8] = MAGIC.to_bytes(8, "little")
        segment._read_header()
        return segment

    @classmethod
    def open(cls, descriptor: int, *, num_ranks: int, is_native: bool) -> Segment:
        """Map what another rank made; the descriptor belongs to the segment from now on."""
        try:
            size = os.fstat(descriptor).st_size
            if size < PAGE:
                raise ArenaGone(f"a group's segment has only {size} bytes")
            segment = cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        was_native = segment._read_header()
        if (segment.num_ranks, was_native) != (num_ranks, is_native):
            segment.close()
            raise ArenaGone(
                f"the segment is of a group of {segment.num_ranks} ranks, not of {num_ranks}",
                fix="start all ranks with the same version and the same ARGOSY_NATIVE",
            )
        return segment

    def _read_header(self) -> bool:
        fields = _HEADER.unpack(self.memory[: _HEADER.size])
        magic, version, layout, size, _nonce, num_ranks, is_native, slot_bytes = fields
        if (magic, version, layout, size) != (MAGIC, VERSION, VERSION, self.size):
            self.close()
            raise ArenaGone(
                f"a group's segment of version {version} and {size} bytes, expected {VERSION} and {self.size}",
                fix="start all ranks with the same version of this package",
            )
        self.num_ranks, self.slot_bytes = num_ranks, slot_bytes
        return bool(is_native)

    @property
    def memory(self) -> memoryview:
        """All bytes."""
        if self._map is None:
            raise ArenaGone("the group's memory has been given back")
        return self._map.memory

    def rank_page(self, rank: int) -> int:
        """Offset of a rank's page."""
        return PAGE * (1 + rank)

    def slot(self, rank: int, parity: int) -> torch.Tensor:
        """A rank's slot of one parity, as bytes."""
        if self._map is None:
            raise ArenaGone("the group's memory has been given back")
        index = (parity & 1) * self.num_ranks + rank
        offset = PAGE * (1 + self.num_ranks) + index * self.slot_bytes
        return self._map.tensor(offset, (self.slot_bytes,), torch.uint8)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of some bytes."""
        return bytes(self.memory[offset : offset + num_bytes])

    def word(self, offset: int) -> int:
        """The 32-bit word at an offset."""
        return int.from_bytes(self.read(offset, 4), "little")

    def last_said(self, rank: int) -> tuple[int, int, int]:
        """(what, count, number) of the last call that a rank has announced."""
        page = self.rank_page(rank)
        said = []
        for parity in range(2):
            at = page + SAID + parity * _DESCRIPTOR_BYTES
            what, count, _factor, call = struct.unpack("<QQQQ", self.memory[at : at + 32])
            said.append((call, what, count))
        call, what, count = max(said)
        return what, count, call

    def write_text(self, rank: int, number: int, text: str) -> None:
        """Publish what this rank has called as its call of this number, for the others' errors."""
        data = text.encode()[: TEXT_BYTES - 8]
        at = self.rank_page(rank) + TEXT
        waits.post(self.address + at - TEXT + TEXT_LENGTH, 0)
        self.memory[at : at + 8 + len(data)] = number.to_bytes(8, "little") + data
        waits.post(self.address + at - TEXT + TEXT_LENGTH, len(data))

    def read_text(self, rank: int, number: int) -> str:
        """What a rank has published for its call of this number, or nothing."""
        page = self.rank_page(rank)
        length = min(waits.peek(self.address + page + TEXT_LENGTH), TEXT_BYTES - 8)
        data = self.read(page + TEXT, 8 + length)
        is_of_call = int.from_bytes(data[:8], "little") == number
        return data[8:].decode(errors="replace") if is_of_call else ""

    def close(self) -> None:
        """Give the memory back; the pages go when the last rank has done so."""
        self._map = None
        self._closer()


def stage_bytes(slot_bytes: int, num_ranks: int) -> int:
    """How much of a slot is for staged data; the rest takes a reduced slice of as much."""
    return slot_bytes * num_ranks // (num_ranks + 1) // PAGE * PAGE
