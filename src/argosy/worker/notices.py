"""Lines for the person who started the program, on stderr.

Called by the household, by `launch` and by a rank that no runtime stands behind. A terminal that was closed, or a reader that has gone, costs
the line and nothing else: what is being said is never worth the work of the ranks.
"""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """One line in Argosy's name."""
    show(f"argosy: {text}")


def show(text: str) -> None:
    """A text as it is, with a newline at its end."""
    # AttributeError: a program that was started without a stderr has None.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
        sys.stderr.flush()


def say_at_once(text: str) -> None:
    """One line in Argosy's name, from a signal handler: not through sys.stderr, in one of whose writes the signal may have come."""
    with contextlib.suppress(OSError):
        os.write(2, f"argosy: {text}\n".encode())
