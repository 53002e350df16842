"""Shield: Ctrl-C while a submission is on its way must not leave a run behind that nobody knows of.

Used around the one question that makes a run: the first Ctrl-C waits for the answer, so that the run can be stopped; a second one ends
the command at once, and the controller drops a submission whose client has left.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from types import FrameType


class Shield:
    """Counts Ctrl-C inside its `with` block."""

    def __init__(self) -> None:
        self.num_interrupts = 0

    def __enter__(self) -> Shield:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.num_interrupts += 1
        if self.num_interrupts > 1:
            raise KeyboardInterrupt
        # Not through sys.stderr: the signal may come in the middle of one of its writes.
        os.write(
            2, b"argosy: stopping as soon as the cluster has answered (Ctrl-C again: at once)\n"
        )
