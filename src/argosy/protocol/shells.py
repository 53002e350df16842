"""The shell that a run is submitted from: environment, directory, umask, limits, interpreter.

Called by control/submission.py for what a person or a program submits, and by checkpoint/processes.py for what a rank needs beside itself. On the way of a
typed command: no typing, no msgspec.
"""

from __future__ import annotations

import os
import sys

from argosy import __version__

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def describe(spec: dict[str, Any], *, env: Mapping[str, str], cwd: str) -> dict[str, Any]:
    """The submission of a spec: what the controller is told of this process beside it."""
    return {
        "spec": spec,
        # What is not UTF-8 cannot travel in JSON.
        "env": {name: value for name, value in env.items() if is_text(name) and is_text(value)},
        "cwd": cwd,
        "umask": _umask(),
        "limits": _limits(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "python": sys.executable,
        "client": __version__,
    }


def is_text(value: str) -> bool:
    """No undecodable bytes in it."""
    return value.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in value)


def _umask() -> int:
    # os.umask() can only be read by setting it, which another thread would notice.
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def _limits() -> dict[str, tuple[int, int]]:
    import resource

    return {
        name.removeprefix("RLIMIT_").lower(): resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"  # the old name of NOFILE
    }
