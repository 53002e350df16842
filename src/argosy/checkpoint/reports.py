"""Who hears what becomes of a checkpointer's saves: the log, the events of the run that this process belongs to, and whoever listens.

Used by checkpointer.py, in whatever thread. No torch.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

from argosy.checkpoint.boards import PartnerFailed
from argosy.checkpoint.events import Advance, Event, Listener, Watcher, What, describe
from argosy.protocol import link

_LOG = logging.getLogger("argosy.checkpoint")
_MOST_TEXT = 8 << 10


class Reports:
    """Of one checkpointer, which has this rank in its group."""

    def __init__(self, rank: int, listener: Listener | None) -> None:
        self._rank = rank
        self._listener = listener
        self.watcher: Watcher | None = None
        """Hears of the bytes of saves as they go, a few times a second."""
        self.tells_run = True
        """Whether the run is told. Who tells it himself sets this to False."""

    def say(self, what: What, step: int, begun: float, detail: str = "") -> None:
        """Something has happened to a save that was begun then."""
        seconds = time.monotonic() - begun
        self._tell(Event(what=what, step=step, seconds=seconds, detail=detail))

    def say_failed(self, step: int, begun: float, failure: BaseException) -> None:
        """It has failed."""
        seconds = time.monotonic() - begun
        is_elsewhere = isinstance(failure, PartnerFailed)
        event = Event(what="failed", step=step, seconds=seconds, detail=str(failure))
        self._tell(event, is_elsewhere=is_elsewhere)

    def advance(
        self,
        what: Literal["written", "uploaded", "copied"],
        step: int,
        num_bytes: int,
        total_bytes: int = 0,
    ) -> None:
        """It goes on."""
        if self.watcher is not None:
            self.watcher(
                Advance(step=step, what=what, num_bytes=num_bytes, total_bytes=total_bytes)
            )

    def _tell(self, event: Event, *, is_elsewhere: bool = False) -> None:
        _LOG.info("step %d %s after %.3f s %s", event.step, event.what, event.seconds, event.detail)
        if self.tells_run:
            self._tell_run(event, is_elsewhere)
        if self._listener is not None:
            self._listener(event)

    def _tell_run(self, event: Event, is_elsewhere: bool) -> None:
        """The lowest rank tells it for all; what has failed here and not because of another process is told here."""
        own, said = link.current(), describe(event)
        if own is None or said is None:
            return
        level, text = said
        if self._rank == 0 or (level == "warning" and not is_elsewhere):
            own.say({"say": level, "text": text[:_MOST_TEXT]})
