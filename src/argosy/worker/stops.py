"""Being asked to leave: SIGTERM from the runtime, and Ctrl-C or a terminal that is closed where no runtime stands between it and the program.

`watch()` is called once by `launch` in the main thread of a rank; the trainer polls `is_asked()` through `gang.stopping`. Until
somebody has polled, nobody would save anything: then the signal does what it does in any program. A process that the runtime starts only
to save what others have left is asked from the beginning, by ARGOSY_STOPPING.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
from types import FrameType

from argosy.worker.notices import say_at_once

STOPPING = "ARGOSY_STOPPING"
_SAYS = "saving what is committed (Ctrl-C again stops without saving)"

_is_asked = False
_is_polled = False


def watch(*, interrupts: bool = False) -> None:
    """Remember SIGTERM instead of dying of it, once somebody polls; with `interrupts` also SIGINT, and SIGHUP unless it is ignored (nohup)."""
    global _is_asked
    _is_asked = _is_asked or bool(os.environ.get(STOPPING))
    signal.signal(signal.SIGTERM, _ask)
    if interrupts:
        signal.signal(signal.SIGINT, _ask)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _ask)


def is_asked() -> bool:
    """Whether a signal asked this process to save and leave."""
    global _is_polled
    _is_polled = True
    return _is_asked


def was_asked() -> bool:
    """The same, for one who promises nothing."""
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
    if signal.getsignal(signal.SIGHUP) is _ask:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _ask(number: int, frame: FrameType | None) -> None:
    global _is_asked
    if number == signal.SIGINT and (_is_asked or not _is_polled):
        # The second Ctrl-C, or nobody who would heed the first.
        signal.default_int_handler(number, frame)
    if number in (signal.SIGTERM, signal.SIGHUP) and not _is_polled:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if number == signal.SIGHUP:
        _leave_terminal()
    _is_asked = True
    if number == signal.SIGINT:
        say_at_once(_SAYS)


def _leave_terminal() -> None:
    """What is still printed goes nowhere instead of failing, if the terminal is gone."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as failure:
            if failure.args[0] == errno.EIO:
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), descriptor)
