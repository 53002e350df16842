"""Being asked to leave: SIGTERM from the runtime, and Ctrl-C where no runtime stands between the terminal and the program.

`watch()` is called once by `launch` in the main thread of a rank; the trainer polls `is_asked()` through `gang.stopping`. Until
somebody has polled, nobody would save anything: then the signal does what it does in any program. A process that the runtime starts only
to save what others have left is asked from the beginning, by ARGOSY_STOPPING.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

from argosy.worker.notices import say_at_once

STOPPING = "ARGOSY_STOPPING"
_SAYS = "saving what is committed (Ctrl-C again stops without saving)"

_is_asked = False
_is_polled = False


def watch(*, interrupts: bool = False) -> None:
    """Remember SIGTERM instead of dying of it, once somebody polls; with `interrupts` also SIGINT."""
    global _is_asked
    _is_asked = _is_asked or bool(os.environ.get(STOPPING))
    signal.signal(signal.SIGTERM, _ask)
    if interrupts:
        signal.signal(signal.SIGINT, _ask)


def is_asked() -> bool:
    """Whether a signal asked this process to save and leave."""
    global _is_polled
    _is_polled = True
    return _is_asked


def die() -> None:
    """End as SIGTERM ends a program: the runtime knows a preempted process from one that has done its work."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    forget()
    os.kill(os.getpid(), signal.SIGTERM)


def forget() -> None:
    """Signals do what they do in a fresh interpreter, and nothing was asked."""
    global _is_asked, _is_polled
    _is_asked = _is_polled = False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _ask(number: int, frame: FrameType | None) -> None:
    global _is_asked
    if number == signal.SIGINT and (_is_asked or not _is_polled):
        # The second Ctrl-C, or nobody who would heed the first.
        signal.default_int_handler(number, frame)
    if number == signal.SIGTERM and not _is_polled:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    _is_asked = True
    if number == signal.SIGINT:
        say_at_once(_SAYS)
