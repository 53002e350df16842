"""sys.stdin, sys.stdout and sys.stderr of a forked rank, made anew for the descriptors it really has.

As a fresh interpreter makes them, with two differences: stdout is line-buffered also on a file, so that logs are timely, and a
full disk under a log file drops output instead of raising in the program. Called by the rank before its program starts.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import Any, cast


class _LogFile(io.FileIO):
    """A log file that swallows what the disk has no room for."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return memoryview(data).nbytes


_kept: list[object] = []
"""The zygote's own streams: loggers made by preloads may still write to them."""


def rebuild() -> None:
    """Replace the three streams and their `sys.__std*__` twins."""
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))
    old_in, old_out = sys.__stdin__ or sys.__stdout__, sys.__stdout__
    sys.stdin = sys.__stdin__ = _reader(_encoding(old_in), _errors(old_in))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _writer(  # type: ignore[misc]
        1, "<stdout>", _encoding(old_out), _errors(old_out)
    )
    sys.stderr = sys.__stderr__ = _writer(  # type: ignore[misc]
        2, "<stderr>", _encoding(sys.__stderr__), "backslashreplace"
    )


def _encoding(old: io.TextIOWrapper | Any) -> str:
    return old.encoding if old is not None else "utf-8"


def _errors(old: io.TextIOWrapper | Any) -> str:
    return (old.errors if old is not None else None) or "strict"


def _reader(encoding: str, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(0, "rb", closefd=False)
    cast(Any, raw).name = "<stdin>"
    stream = io.TextIOWrapper(
        io.BufferedReader(raw),
        encoding=encoding,
        errors=errors,
        line_buffering=os.isatty(0),
        write_through=_is_unbuffered(),
    )
    cast(Any, stream).mode = "r"
    return stream


def _writer(descriptor: int, name: str, encoding: str, errors: str) -> io.TextIOWrapper:
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    raw = (_LogFile if is_file else io.FileIO)(descriptor, "wb", closefd=False)
    cast(Any, raw).name = name
    is_unbuffered = _is_unbuffered()
    stream = io.TextIOWrapper(
        cast(Any, raw) if is_unbuffered else io.BufferedWriter(raw),
        encoding=encoding,
        errors=errors,
        newline="\n",
        line_buffering=not is_unbuffered,
        write_through=is_unbuffered,
    )
    cast(Any, stream).mode = "w"
    return stream


def _is_unbuffered() -> bool:
    return bool(os.environ.get("PYTHONUNBUFFERED")) and not sys.flags.ignore_environment
