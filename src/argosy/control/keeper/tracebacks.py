"""Tracebacks at the end of what a process wrote to its stderr.

A command that was not forked by a warm parent leaves no error file; what Python printed as it ended says the same. Used by `exits`, so that
the exception is in the exit event, where every decision about another start reads it. Pure, but for reading the end of a file.
"""

from __future__ import annotations

import os
import stat

UNCAUGHT_CODE = 1
"""How Python ends after an exception that nobody caught."""
_HEAD = "Traceback (most recent call last):"
_OF_THREADS = "Exception in thread "
_OF_OTHERS = ("Exception ignored ", _OF_THREADS)
_OF_SYNTAX = ("SyntaxError", "IndentationError", "TabError")
_MOST_BYTES = 16 << 10


def last_traceback(text: str) -> str:
    """The traceback with which the text ends, up to the line that names the exception; empty when it ends with anything else.

    Those of exceptions that Python ignores as it ends, and of threads, are passed over; a thread's is the answer when there is no other.
    """
    lines = [_without_rank(line) for line in text.splitlines()]
    thread = ""
    while True:
        last = len(lines) - 1
        while last >= 0 and _is_beside(lines[last]):
            last -= 1
        if last < 1 or not _names_exception(lines[last]):
            return thread
        first = last - 1
        while first >= 0 and lines[first].startswith(" "):
            first -= 1
        if first < 0 or lines[first] != _HEAD:
            break
        if first == 0 or not lines[first - 1].startswith(_OF_OTHERS):
            return "\n".join(lines[first : last + 1])
        if lines[first - 1].startswith(_OF_THREADS):
            thread = "\n".join(lines[first : last + 1])
        del lines[first - 1 :]
    # The program's own source could not be read: there is no frame, only the place.
    is_syntax = lines[last].partition(":")[0] in _OF_SYNTAX
    if is_syntax and lines[first + 1].startswith('  File "'):
        return "\n".join(lines[first + 1 : last + 1])
    return thread


def read_last_traceback(path: str) -> str:
    """Of a plain file; empty when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return ""
        end = os.pread(fd, _MOST_BYTES, max(0, found.st_size - _MOST_BYTES))
    except OSError:
        return ""
    finally:
        os.close(fd)
    return last_traceback(end.decode("utf-8", "replace"))


def _without_rank(line: str) -> str:
    """torch.distributed puts the rank before each line of a traceback."""
    head, mark, rest = line.partition("]: ")
    return rest if mark and head.startswith("[rank") and head[5:].isdigit() else line


def _is_beside(line: str) -> bool:
    """Not said by the exception, or not its first line: the rest of its message, and warnings as the interpreter ends."""
    is_log = line.startswith(("[W", "[E", "[rank")) or "Warning: " in line
    return not line.strip() or line[0].isspace() or is_log


def _names_exception(line: str) -> bool:
    name = line.partition(":")[0]
    return all(part.isidentifier() for part in name.split("."))
