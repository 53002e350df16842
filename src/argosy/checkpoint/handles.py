"""A save that goes on in the background, as the one who asked for it sees it: requested, staged, durable or failed.

Advanced by the threads of background.py; waited for by anybody. No torch.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Literal

from argosy.errors import TimedOut

Stage = Literal["requested", "staged", "durable", "failed"]
_ORDER: tuple[Stage, ...] = ("requested", "staged", "durable")


class SaveHandle:
    """What became of a save; `staged` means that it will be finished even if this process is killed."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        """Where it will be."""
        self.written_bytes = 0
        """On their way to the disk, by the last news."""
        self.total_bytes = 0
        """Of this process's share."""
        self.how = ""
        """How the snapshot is taken: "gated", "blocking" or "written in place"."""
        self.error: BaseException | None = None
        self.is_reported = False
        """Whether somebody was told the error."""
        self._stage: Stage = "requested"
        self.begun = time.monotonic()
        self._claimed: set[Stage] = set()
        self._seconds: dict[str, float] = {}
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<save of step {self.step}, {self.stage}>"

    @property
    def stage(self) -> Stage:
        """How far it is."""
        return self._stage

    @property
    def is_done(self) -> bool:
        """Whether nothing more will happen to it."""
        return self._stage in ("durable", "failed")

    def wait(
        self, until: Literal["staged", "durable"] = "durable", timeout: float | None = None
    ) -> Path:
        """Until it is staged or durable; raises what went wrong, TimedOut after so many seconds."""
        wanted = _ORDER.index(until)
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_reached(wanted), timeout):
                raise TimedOut(
                    f"step {self.step} is {self._stage}, not {until}, after {timeout} s",
                    fix="wait longer, or see the writer process",
                )
        if self.error is not None:
            self.is_reported = True
            raise self.error
        return self.path

    def settle(self) -> None:
        """Until nothing more will happen to it, well or not; who is told an error is decided elsewhere."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_done)

    def statistics(self) -> dict[str, float]:
        """Seconds from the request to each stage, and whatever the writer measured."""
        return dict(self._seconds)

    def claim(self, stage: Stage) -> bool:
        """For the one who saves: whether it is the first to bring it so far."""
        with self._changed:
            is_new = stage not in self._claimed and not self._claimed & {"durable", "failed"}
            self._claimed.add(stage)
        return is_new

    def advance(self, stage: Stage, **measured: float) -> None:
        """For the one who saves: it is so far now."""
        with self._changed:
            if not self.is_done:
                self._stage = stage
            self._seconds[stage] = time.monotonic() - self.begun
            self._seconds |= measured
            self._changed.notify_all()

    def _has_reached(self, wanted: int) -> bool:
        return self._stage == "failed" or _ORDER.index(self._stage) >= wanted
