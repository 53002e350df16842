"""File change notices of the kernel (inotify), so that followers of files sleep while nothing happens.

Used by the agent's log index and by everybody who follows logs. The descriptor can be given to a selector or an event loop; a
notice says only that something changed, readers look for themselves.
"""

from __future__ import annotations

import ctypes
import os
import struct

MODIFY = 0x00000002
CREATE = 0x00000100
_OVERFLOW = 0x00004000
_IGNORED = 0x00008000
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """One inotify descriptor with its watches."""

    def __init__(self) -> None:
        self._descriptor = _libc.inotify_init1(_FLAGS)
        if self._descriptor < 0:
            raise _error("inotify_init1")

    def fileno(self) -> int:
        """Readable when there is a notice."""
        return int(self._descriptor)

    def watch(self, path: str, mask: int) -> int:
        """Begin to watch; the number comes back with each notice. The same file again gives the same number."""
        number = _libc.inotify_add_watch(self._descriptor, os.fsencode(path), ctypes.c_uint32(mask))
        if number < 0:
            raise _error(path)
        return int(number)

    def unwatch(self, number: int) -> None:
        """End a watch; one that has ended by itself is fine."""
        _libc.inotify_rm_watch(self._descriptor, number)

    def read(self) -> set[int] | None:
        """Numbers of the watches that saw something since the last call; None: notices were lost, look everywhere."""
        changed: set[int] = set()
        has_lost = False
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                return None if has_lost else changed
            offset = 0
            while offset < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size + length
                if mask & _OVERFLOW:
                    has_lost = True
                elif not mask & _IGNORED:
                    changed.add(number)

    def close(self) -> None:
        """End all watches."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
