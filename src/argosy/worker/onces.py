"""Side effects of a run that should happen once, not once per rank: `run.once(fn)`.

Whoever comes first runs the function under a lock on a file of the run's directory and marks it done; all others wait for that. The
kernel opens the lock of a process that dies, and the next one runs the function again: it happens *at least once*, to its end, and
twice only if a death fell into it. Used by `Run.once`; a process that comes by later, a replacement for one, finds the mark.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

_DONE = b"done "


def run_once(directory: Path, key: str, fn: Callable[[], object]) -> bool:
    """Run `fn` unless it was run under this key; whether it ran here. Returns when it is done, wherever it runs."""
    directory.mkdir(exist_ok=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    descriptor = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.pread(descriptor, len(_DONE), 0) == _DONE:
            return False
        fn()
        os.pwrite(descriptor, _DONE + key.encode() + b"\n", 0)
        os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)
