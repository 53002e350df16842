"""How much memory this host can still give, and taking it for a memfd before anybody writes to it.

A memfd without pages ends its writer with SIGBUS when the host is full; here the pages are reserved first, and what cannot be had
is a `NoRoom` with the sizes. Called by mapping.py; knows nothing of arenas and never imports torch.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from argosy.errors import NoRoom

PAGE = 4096
MARGIN_BYTES = 32 << 20
"""Left to the rest of the host: the kernel kills somebody before it refuses the last page."""
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_SAMPLES = 16
_NO_SPACE = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_mincore = ctypes.CDLL(None).mincore


def round_up(num_bytes: int) -> int:
    """To whole pages."""
    return (num_bytes + PAGE - 1) // PAGE * PAGE


def reserve(descriptor: int, size: int, what: str) -> None:
    """Give a memfd all its pages, or raise NoRoom with nothing taken."""
    missing = size - os.fstat(descriptor).st_blocks * 512
    if missing <= 0:
        return
    free = available_bytes()
    if missing > free - MARGIN_BYTES:
        raise NoRoom(
            f"{what} needs {_mebibytes(missing)} and this host can give {_mebibytes(free)}",
            fix="use fewer or smaller arenas, end other programs, or raise the memory limit",
        )
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as failure:
        if failure.errno not in _NO_SPACE:
            raise
        raise NoRoom(
            f"{what} needs {_mebibytes(missing)}: {failure.strerror}",
            fix="use fewer or smaller arenas, end other programs, or raise the memory limit",
        )


def populate(memory: mmap.mmap, *, is_writing: bool) -> None:
    """Fill the page tables now, so that first touches are not page faults; a kernel that cannot is fine."""
    # Pages with contents are mapped sixteen at a time for reading, and are writable as well; empty ones take longer that way.
    if is_writing and has_contents(memory):
        is_writing = False
    try:
        memory.madvise(_MADV_POPULATE_WRITE if is_writing else _MADV_POPULATE_READ)
    except OSError as failure:
        if failure.errno not in (errno.EINVAL, errno.EPERM):
            raise NoRoom(
                f"{_mebibytes(len(memory))} cannot be mapped: {failure.strerror}",
                fix="end other programs, or raise the memory limit",
            )


def has_contents(memory: mmap.mmap) -> bool:
    """Whether pages all over it have been written to, by whichever process; reserved ones have not."""
    last = max(0, len(memory) // PAGE - 1)
    anchor = ctypes.c_char.from_buffer(memory)
    address, found = ctypes.addressof(anchor), ctypes.c_ubyte()
    for sample in range(_SAMPLES):
        page = ctypes.c_void_p(address + last * sample // (_SAMPLES - 1) * PAGE)
        if _mincore(page, ctypes.c_size_t(PAGE), ctypes.byref(found)) or not found.value & 1:
            return False
    return True


def available_bytes() -> int:
    """What can be taken without swapping others out: the host's own estimate, and what the cgroups leave."""
    free = None
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("MemAvailable", "SwapFree"):
            free = (free or 0) + int(value.split()[0]) * 1024
    return min([1 << 62 if free is None else free, *_cgroup_rooms()])


def _cgroup_rooms() -> Iterator[int]:
    """What each limited cgroup of this process still allows, up to the root, in either hierarchy."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, limit, usage = Path("/sys/fs/cgroup/memory"), "limit_in_bytes", "usage_in_bytes"
        elif controllers == "":
            unified = Path("/sys/fs/cgroup/unified")
            base = unified if unified.is_dir() else Path("/sys/fs/cgroup")
            limit, usage = "max", "current"
        else:
            continue
        group = base / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(base):
                break
            room = _cgroup_room(directory, f"memory.{limit}", f"memory.{usage}")
            if room is not None:
                yield room


def _cgroup_room(directory: Path, limit_file: str, usage_file: str) -> int | None:
    try:
        limit = int((directory / limit_file).read_text())
        used = int((directory / usage_file).read_text())
        lines = (directory / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None  # no controller here, or "max"
    # Cached files can be dropped for us; shared memory is counted with the anonymous pages.
    cached = sum(
        int(line.split()[1])
        for line in lines
        if line.startswith(("inactive_file ", "active_file "))
    )
    return None if limit >= 1 << 60 else max(0, limit - used + cached)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
