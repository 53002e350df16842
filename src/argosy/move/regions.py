"""Where tensors lie: in memory that other processes can map, or in this process alone.

Tells for a tensor which shared file mapping it lies in and with which descriptor that can be opened (arenas, pools, any memfd), by the
kernel's own table. Used by reshard to choose between mapping a peer's memory and reading it. Never copies elements.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from argosy.move.mapping import span_bytes

Addresses = npt.NDArray[np.uint64]
_MOST_VECTORS = 1024
_MOST_CALL_BYTES = 1 << 30


class Region(NamedTuple):
    """A shared mapping of a file, and the descriptor it can be handed over with."""

    start: int
    stop: int
    offset: int
    device: int
    inode: int
    descriptor: int


class Regions:
    """The shared mappings of this process at one moment that have an open descriptor."""

    def __init__(self) -> None:
        descriptors = _descriptors()
        found = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, flags, offset, device, inode, *_ = line.split(maxsplit=5)
            major, minor = (int(part, 16) for part in device.split(":"))
            key = (os.makedev(major, minor), int(inode))
            if flags[3] != "s" or key not in descriptors:
                continue
            start, stop = (int(part, 16) for part in span.split("-"))
            found.append(Region(start, stop, int(offset, 16), *key, descriptors[key]))
        self._regions = sorted(found)
        self._starts = [region.start for region in self._regions]

    def find(self, tensor: torch.Tensor) -> tuple[Region, int] | None:
        """The mapping that holds all of a tensor, and the tensor's offset in the file; None when there is none."""
        place = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
        if place < 0:
            return None
        region = self._regions[place]
        end = tensor.data_ptr() + span_bytes(tensor.shape, tensor.stride(), tensor.dtype)
        if end > region.stop:
            return None
        return region, tensor.data_ptr() - region.start + region.offset


def _descriptors() -> dict[tuple[int, int], int]:
    """An open descriptor of this process for every file that it can read, by device and inode."""
    found: dict[tuple[int, int], int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # the listing's own descriptor
        found.setdefault((status.st_dev, status.st_ino), int(name))
    return found


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def read_process(pid: int, theirs: Addresses, ours: Addresses, run_bytes: int) -> None:
    """Copy runs of `run_bytes` from addresses of another process to as many addresses of this one; OSError when the kernel refuses."""
    most = max(1, min(_MOST_VECTORS, _MOST_CALL_BYTES // run_bytes))
    for first in range(0, len(theirs), most):
        remote = _vectors(theirs[first : first + most], run_bytes)
        local = _vectors(ours[first : first + most], run_bytes)
        wanted = len(remote) * run_bytes
        done = _libc.process_vm_readv(
            pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
        )
        if done != wanted:
            number = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))


def pid_of(pidfd: int) -> int:
    """The number of a watched process in this process's namespace; -1 when it has ended or has none here."""
    try:
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
            if line.startswith("Pid:"):
                return int(line.split()[1])
    except OSError:
        pass
    return -1


def _vectors(addresses: Addresses, length: int) -> Addresses:
    vectors = np.empty((len(addresses), 2), dtype=np.uint64)
    vectors[:, 0] = addresses
    vectors[:, 1] = length
    return vectors


def read_process_bytes(pid: int, address: int, count: int) -> bytes | None:
    """A few bytes of another process; None when the kernel does not allow it."""
    room = np.empty(count, dtype=np.uint8)
    theirs = np.array([address], dtype=np.uint64)
    ours = np.array([room.ctypes.data], dtype=np.uint64)
    try:
        read_process(pid, theirs, ours, count)
    except OSError:
        return None
    return room.tobytes()
