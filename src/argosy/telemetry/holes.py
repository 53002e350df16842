"""Holes in output files: a process that says more than its `log_bytes` loses the oldest part, and a hole is left at the head of its file.

Shared by those who punch holes (the agent's log index) and those who read around them. Imports nothing: the command line pays for it.
"""

from __future__ import annotations

import errno
import os


def next_data(descriptor: int, position: int, size: int) -> int:
    """The first offset from `position` on that is not in a hole."""
    if position >= size:
        return position
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        if error.errno == errno.EINVAL:
            return position
        raise


def read_data(descriptor: int, position: int, most_bytes: int) -> tuple[int, bytes]:
    """What there is from `position` on, and where it begins: behind the hole, if there is one. Never the zeros of a hole."""
    while True:
        size = os.fstat(descriptor).st_size
        start = next_data(descriptor, position, size)
        data = os.pread(descriptor, most_bytes, start)
        # The head may have been dropped while it was being read.
        if not data or next_data(descriptor, start, size) == start:
            return start, data


def describe_dropped(num_bytes: int) -> str:
    """What people are told in the place of what is gone."""
    return f"{num_bytes:,} bytes of output were dropped here, to keep to log_bytes"
