"""The header and directory of an arena: bytes in a memfd that any process of the run can read.

The header is one page at the front, its magic stored last. The directory grows by appending, from the end of the memfd downwards; an entry counts
when the directory's length, stored last, includes it, so a writer that dies leaves nothing half-made. Used by arenas.py and pools.py.
Never imports torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import msgspec

from argosy.errors import ArenaGone, ConfigError, NoRoom, TimedOut
from argosy.move.hostmemory import PAGE, round_up

LAYOUT = 1
DIRECTORY_BYTES = 64 << 10
"""Kept for the directory on top of the size asked for: some 300 entries; more of them take from the arena's room."""
_MAGIC = int.from_bytes(b"argosy\x00\x01", "little")
_LAYOUT_AT, _IDENTITY_AT, _LENGTH_AT = 8, 16, PAGE - 64
_MOST_IDENTITY = _LENGTH_AT - _IDENTITY_AT
_NUMBERS = struct.Struct("<II")
_LOCK_SECONDS = 10.0
_READ_TRIES = 200


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Whose memory this is."""

    name: str
    run: str
    size: int
    nonce: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One allocation; an unnamed one is known to its maker alone."""

    offset: int
    num_bytes: int
    kind: Literal["tensor", "words", "pool"]
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What shall be allocated, or named inside an earlier request of the same batch."""

    num_bytes: int
    kind: Literal["tensor", "words", "pool"] = "tensor"
    name: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    inside: int = -1
    """Index of the request whose bytes these are a part of; -1: bytes of its own."""
    shift: int = 0
    """Where inside it."""


def file_bytes(size: int) -> int:
    """Size of the memfd that has room for `size` bytes of allocations."""
    return PAGE + round_up(size) + DIRECTORY_BYTES


class Directory:
    """What lies in one mapped arena; any process may append, one at a time."""

    def __init__(self, memory: memoryview, descriptor: int) -> None:
        self._memory = memory
        self._descriptor = descriptor
        self._entries: list[Entry] = []
        self._by_name: dict[str, Entry] = {}
        self._read_bytes = 0
        self._data_end = PAGE

    def initialise(self, name: str, run: str) -> Identity:
        """Write the header unless it is there; which of two makers does it is settled by the lock."""
        with locked(self._descriptor):
            if _load(self._memory, 0) == 0:
                identity = Identity(
                    name=name, run=run, size=len(self._memory), nonce=secrets.token_hex(16)
                )
                text = msgspec.json.encode(identity)
                if len(text) > _MOST_IDENTITY:
                    raise ConfigError(
                        f"arena {name[:60]!r}…: its name is too long", fix="shorten it"
                    )
                self._memory[_IDENTITY_AT : _IDENTITY_AT + len(text)] = text
                _NUMBERS.pack_into(self._memory, _LAYOUT_AT, LAYOUT, len(text))
                _store(self._memory, 0, _MAGIC)
        return self.identify(name, run)

    def identify(self, name: str, run: str) -> Identity:
        """Read the header; ArenaGone when it is not the arena that was asked for. An empty name takes any."""
        if len(self._memory) < PAGE or _load(self._memory, 0) != _MAGIC:
            raise ArenaGone(
                f"the memory named {name!r} has no arena's header",
                fix="its maker has not finished or another program made it: create it first",
            )
        layout, length = _NUMBERS.unpack_from(self._memory, _LAYOUT_AT)
        if layout != LAYOUT or length > _MOST_IDENTITY:
            raise ArenaGone(
                f"arena {name!r} has layout {layout}, this version reads {LAYOUT}",
                fix="use one version of argosy in all processes of a run",
            )
        text = bytes(self._memory[_IDENTITY_AT : _IDENTITY_AT + length])
        try:
            found = msgspec.json.decode(text, type=Identity)
        except msgspec.DecodeError as failure:
            raise ArenaGone(f"arena {name!r} has a damaged header: {failure}", fix="make it anew")
        if (name and found.name != name) or found.run != run or found.size != len(self._memory):
            raise ArenaGone(
                f"found arena {found.name!r} of run {found.run or '(none)'!r} with {found.size} bytes, "
                f"wanted {name!r} of run {run or '(none)'!r} with {len(self._memory)}",
                fix="open arenas of this run by their own names",
            )
        return found

    def find(self, name: str) -> Entry | None:
        """The entry of that name, also one that another process has just added."""
        if name not in self._by_name:
            self._refresh()
        return self._by_name.get(name)

    def entries(self) -> list[Entry]:
        """All there are now."""
        self._refresh()
        return list(self._entries)

    def append(self, requests: Sequence[Request]) -> list[Entry]:
        """Allocate all or nothing; in one commit."""
        with locked(self._descriptor):
            self._refresh()
            made: list[Entry] = []
            records, offset = [], self._data_end
            for request in requests:
                self._refuse_second(request, made)
                if request.inside >= 0:
                    made.append(_entry(request, made[request.inside].offset + request.shift))
                else:
                    made.append(_entry(request, offset))
                    offset += round_up(request.num_bytes)
                records.append(_encode(made[-1]))
            added = sum(map(len, records))
            top = len(self._memory) - self._read_bytes
            if offset > min(top - added, len(self._memory) - DIRECTORY_BYTES):
                raise NoRoom(
                    f"{sum(request.num_bytes for request in requests)} bytes for {_named(requests)} "
                    f"in an arena with {self.free_bytes()} of {self.capacity} bytes free",
                    fix="create the arena with a larger size (each allocation takes whole 4 KiB pages)",
                )
            for record in records:
                self._memory[top - len(record) : top] = record
                top -= len(record)
            _store(self._memory, _LENGTH_AT, self._read_bytes + added)
            self._refresh()
        return made

    @property
    def capacity(self) -> int:
        """Bytes for allocations, as asked for at the creation."""
        return len(self._memory) - PAGE - DIRECTORY_BYTES

    def free_bytes(self) -> int:
        """Bytes that a further allocation may have."""
        kept = max(DIRECTORY_BYTES, round_up(self._read_bytes + PAGE // 2))
        return max(0, len(self._memory) - kept - self._data_end)

    def statistics(self) -> dict[str, int]:
        """Counts and bytes."""
        entries = self.entries()
        return {
            "size": self.capacity,
            "used": self._data_end - PAGE,
            "free": self.free_bytes(),
            "directory": self._read_bytes,
            "tensors": sum(entry.kind == "tensor" for entry in entries),
            "words": sum(entry.kind == "words" for entry in entries),
        }

    def _refuse_second(self, request: Request, made: list[Entry]) -> None:
        if request.num_bytes < 0:
            raise ConfigError(f"{request.num_bytes} bytes for {request.name!r}")
        taken = self._by_name.keys() | {entry.name for entry in made}
        if request.name and request.name in taken:
            raise ConfigError(
                f"the arena has {request.name!r} already",
                fix="get it with tensor() or words(), or use another name",
            )

    def _refresh(self) -> None:
        """Read what others have added."""
        length = _load(self._memory, _LENGTH_AT)
        if length > len(self._memory) - PAGE:
            raise ArenaGone(f"the arena's directory claims {length} bytes", fix="make it anew")
        while self._read_bytes < length:
            entry, num_bytes = self._read_entry(len(self._memory) - self._read_bytes)
            self._entries.append(entry)
            if entry.name:
                self._by_name[entry.name] = entry
            self._data_end = max(self._data_end, entry.offset + round_up(entry.num_bytes))
            self._read_bytes += num_bytes

    def _read_entry(self, top: int) -> tuple[Entry, int]:
        for _ in range(_READ_TRIES):
            length, checksum = _NUMBERS.unpack_from(self._memory, top - _NUMBERS.size)
            start = top - _NUMBERS.size - length
            if start >= PAGE:
                text = bytes(self._memory[start : start + length])
                if zlib.crc32(text) == checksum:
                    entry = msgspec.json.decode(text, type=Entry)
                    return entry, _padded(length + _NUMBERS.size)
            # A weakly ordered processor may show the length before the bytes: they are on their way.
            os.sched_yield()
        raise ArenaGone("the arena's directory is damaged", fix="make it anew")


def _entry(request: Request, offset: int) -> Entry:
    return Entry(
        offset=offset,
        num_bytes=request.num_bytes,
        kind=request.kind,
        name=request.name,
        dtype=request.dtype,
        shape=request.shape,
        strides=request.strides,
    )


def _encode(entry: Entry) -> bytes:
    """Text, padding below it, and its length and checksum at the end, where the reader comes from."""
    text = msgspec.json.encode(entry)
    record = text + _NUMBERS.pack(len(text), zlib.crc32(text))
    return bytes(_padded(len(record)) - len(record)) + record


def _padded(length: int) -> int:
    return (length + 7) // 8 * 8


def _named(requests: Sequence[Request]) -> str:
    first = requests[0].name or f"an unnamed {requests[0].kind}"
    return first if len(requests) == 1 else f"{first} and {len(requests) - 1} more"


def _load(memory: memoryview, offset: int) -> int:
    return ctypes.c_uint64.from_buffer(memory, offset).value


def _store(memory: memoryview, offset: int, value: int) -> None:
    # A system call between the bytes and the word that publishes them; the checksums see to the rest.
    os.sched_yield()
    ctypes.c_uint64.from_buffer(memory, offset).value = value


# --- one writer at a time -----------------------------------------------------------------------

_held: set[int] = set()


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold the arena's lock, which the kernel frees when this process dies; waits for another writer for a bounded time."""
    # A descriptor that was handed over shares its locks with the sender: only a description of our own excludes others.
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    _held.add(own)
    deadline, pause = time.monotonic() + _LOCK_SECONDS, 0.0002
    try:
        while not _try_lock(own):
            if time.monotonic() >= deadline:
                raise TimedOut(
                    f"another process has written to the arena's directory for {_LOCK_SECONDS:g} s",
                    fix="a stopped process may hold it: continue or kill it",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        yield
    finally:
        _held.discard(own)
        os.close(own)


def _try_lock(descriptor: int) -> bool:
    """An open-file-description lock on the first byte; the struct is the kernel's `flock`."""
    try:
        fcntl.fcntl(
            descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 1, 0)
        )
    except BlockingIOError:
        return False
    return True


def _drop_in_child() -> None:
    """A child forked while another thread held a lock would keep it for its own life."""
    for descriptor in list(_held):
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)
