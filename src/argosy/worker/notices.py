"""Lines for the person who started the program, on stderr.

Called by the household, by `launch` and by a rank that no runtime stands behind. A terminal that was closed, or a reader that has gone, costs
the line and nothing else: what is being said is never worth the work of the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys


def say(text: str) -> None:
    """One line in Argosy's name."""
    show(f"argosy: {text}")


def show(text: str) -> None:
    """A text as it is, with a newline at its end."""
    # AttributeError: a program that was started without a stderr has None.
    with contextlib.suppress(ValueError, AttributeError):
        try:
            sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
            sys.stderr.flush()
        except OSError as failure:
            if failure.errno in (errno.EPIPE, errno.EIO):  # a full disk may have room again
                _discard_errors()


def _discard_errors() -> None:
    """Nobody reads stderr any more: what is left in its buffer would fail again when Python ends, and cost the exit code."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


def say_at_once(text: str) -> None:
    """One line in Argosy's name, from a signal handler: not through sys.stderr, in one of whose writes the signal may have come."""
    with contextlib.suppress(OSError):
        os.write(2, f"argosy: {text}\n".encode())
