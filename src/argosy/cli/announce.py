"""Announce: what a command in the foreground says of its run before the first and after the last line of output, on stderr.

The output of a single process is its bytes and nothing else, so only a terminal is told of it; lines of several are labelled
anyway, and so is everybody told. Used by `argosy run` and `argosy attach`; failures are told by why.py.
"""

from __future__ import annotations

import os
import sys

from argosy.cli.paint import Paint, duration

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any


def announce_start(view: dict[str, Any]) -> None:
    """Which run it is, how its parts are called, and where its output is kept."""
    roles = _roles(view)
    parts = f", {roles}" if roles else ""
    _say(view, f"{_name(view)}{parts}: output is kept in {view['directory']}/logs")


def announce_success(view: dict[str, Any]) -> None:
    """That it has succeeded, and how long it took."""
    took = (view.get("ended_at") or 0.0) - (view.get("started_at") or view["submitted_at"])
    _say(view, f"{_name(view)} succeeded after {duration(took)}")


def warn_of_input(descriptor: int = 0) -> None:
    """What was piped into a command whose program does not get it, would be gone without a word."""
    import stat

    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode) or not _num_waiting(descriptor):
            return
    except OSError:
        return  # closed: nothing can be lost
    sys.stderr.write(
        "argosy: what is piped in is not passed on: the program's stdin is empty; let it read a file\n"
    )


def _num_waiting(descriptor: int) -> int:
    import array
    import fcntl
    import termios

    found = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, found)
    return found[0]


def _roles(view: dict[str, Any]) -> str:
    """`role train x4`, as the other verbs name them (`RUN/train/2`); nothing for a single process."""
    counts = {role["role"]: int(role.get("count", 1)) for role in view["roles"]}
    if sum(counts.values()) == 1:
        return ""
    named = ", ".join(f"{role} x{count}" if count > 1 else role for role, count in counts.items())
    return f"role{'s' if len(counts) > 1 else ''} {named}"


def _name(view: dict[str, Any]) -> str:
    return f"run {view['run']}" + (f" ({view['name']})" if view.get("name") else "")


def _say(view: dict[str, Any], text: str) -> None:
    paint = Paint(sys.stderr)
    if sum(int(role.get("count", 1)) for role in view["roles"]) > 1 or paint.is_terminal:
        sys.stdout.flush()
        sys.stderr.write(f"{paint('argosy:', 'dim')} {text}\n")
        sys.stderr.flush()
