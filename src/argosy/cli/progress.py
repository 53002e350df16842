"""Progress: one line that appears when something takes longer than a second.

On a terminal it is redrawn in place and wiped afterwards; elsewhere each new text is printed once. Driven by SIGALRM while a
call blocks (`Progress.during`), or by the caller's own loop (`Progress.show`). It writes to stderr only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from argosy.cli.paint import duration

PATIENCE_SECONDS = 1.0
_REDRAW_SECONDS = 0.25


class Progress:
    """The line at the bottom of stderr."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._is_terminal = os.isatty(2)
        self._text = ""
        self._detail = ""
        self._since = time.monotonic()
        self._shown = ""

    def begin(self, text: str, detail: str = "") -> None:
        """Something begins that may take long; the clock starts when the text is new. The detail, which changes often, is for terminals."""
        self._detail = f": {detail}" if detail else ""
        if text != self._text:
            self.clear()
            self._text = text
            self._since = time.monotonic()

    def show(self) -> None:
        """Draw the line if it is time to."""
        elapsed = time.monotonic() - self._since
        if self._is_quiet or not self._text or elapsed < PATIENCE_SECONDS:
            return
        if self._is_terminal:
            self._shown = self._text
            _write(f"\r\033[Kargosy: {self._text}{self._detail} … {_seconds(elapsed)}")
        elif self._shown != self._text:
            self._shown = self._text
            _write(f"argosy: {self._text} …\n")

    def clear(self) -> None:
        """Wipe the line before anything else is printed."""
        if self._shown and self._is_terminal:
            _write("\r\033[K")
            self._shown = ""

    def end(self) -> None:
        """Nothing is being waited for."""
        self.clear()
        self._text = ""

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Show the line while the block runs, even when it blocks in one call. Main thread only."""
        self.begin(text)
        before = signal.signal(signal.SIGALRM, lambda *_: self.show())
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS + 0.01, _REDRAW_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            self.end()


def _seconds(elapsed: float) -> str:
    return f"{int(elapsed)}s" if elapsed < 60 else duration(elapsed)


def _write(text: str) -> None:
    # Not through sys.stderr: the alarm may come in the middle of one of its writes.
    try:
        os.write(2, text.encode())
    except OSError:
        pass
