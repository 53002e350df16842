"""Space of files, asked of the kernel: reserved ahead of what will be written, and given back from their heads.

Used for the event log and for the output of processes; each reserves what it needs to say its last words on a disk that others have filled.
"""

from __future__ import annotations

import ctypes
import os

_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
_libc = ctypes.CDLL(None, use_errno=True)


def reserve(descriptor: int, offset: int, length: int) -> None:
    """Make sure that writing there will not want for space; the file's size stays. OSError: the disk is full, or cannot."""
    _fallocate(descriptor, _KEEP_SIZE, offset, length)


def give_back(descriptor: int, offset: int, length: int) -> None:
    """Leave a hole there; the file's size stays. OSError."""
    _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    result = _libc.fallocate(descriptor, mode, ctypes.c_longlong(offset), ctypes.c_longlong(length))
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
