"""Shield: Ctrl-C from the question that makes a run until somebody looks after it must not leave a run behind that nobody knows of.

The first Ctrl-C waits for the answer, so that the run can be stopped. A second one ends the command at once: a copy of the process stays behind,
without a terminal, until the answer has come and the run is stopped.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from types import FrameType

_ABSENT = (FileNotFoundError, ConnectionRefusedError)
"""Nobody was asked."""


class Shield:
    """Counts Ctrl-C from its `with` block on, until it is lifted or the block fails."""

    def __init__(self) -> None:
        self.num_interrupts = 0
        self._is_up = False

    def __enter__(self) -> Shield:
        if not self._is_up:
            self._before = signal.signal(signal.SIGINT, self._note)
            self._is_up = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.lift() and issubclass(kind, _ABSENT):
            raise KeyboardInterrupt

    def lift(self) -> int:
        """How often Ctrl-C was pressed. If never, it does from now on what it did before, or what somebody else has made of it meanwhile."""
        if self._is_up and not self.num_interrupts:
            self._is_up = False
            if signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, self._before)
        return self.num_interrupts

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._is_up:
            if callable(self._before):
                self._before(number, frame)
            return
        self.num_interrupts += 1
        if self.num_interrupts == 1:
            # Not through sys.stderr: the signal may come in the middle of one of its writes.
            os.write(
                2, b"argosy: stopping as soon as the cluster has answered (Ctrl-C again: at once)\n"
            )
        elif os.fork():
            raise KeyboardInterrupt
        else:
            _stay_behind()


def _stay_behind() -> None:
    """Without the terminal and whoever reads the output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
