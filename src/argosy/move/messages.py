"""Messages from one rank to another: Gloo's, with errors that say who is lost.

groups.py makes a `Message` for every send and receive; pipelining, batches and plain `dist.send` all come through it. A rank that has ended
closes its connections: Gloo says so at once, and its process descriptor tells a dead peer from one that has left the group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from argosy.errors import ArgosyError, NoRoute, PeerLost, TimedOut
from argosy.move import torchgroup

Explain = Callable[[Exception], Exception]


def begin(
    start: Callable[[], Any], explain: Explain, is_lost: Callable[[], bool] | None = None
) -> Message:
    """Hand a message to Gloo, which may refuse it at once: its peer may be gone already."""
    try:
        return Message(start(), explain, is_lost)
    except RuntimeError as failure:
        raise explain(failure) from failure


def explained(what: str, failure: Exception, lost: int | None) -> ArgosyError:
    """The error of a failed connection; `lost` is the rank that has ended, if one has."""
    if lost is not None:
        return PeerLost(lost, what)
    if torchgroup.has_timed_out(failure):
        return TimedOut(
            f"{what}: nothing came in time",
            fix="see where that rank is (`argosy stacks`), or give the group a longer timeout",
        )
    return NoRoute(
        f"{what}: Gloo's connection has failed: {failure}",
        fix="see the other ranks' output: one has left the group or failed before",
    )


class Message(dist.Work):
    """Gloo's work of one message; with `is_lost` its peer is watched, since Gloo does not see all deaths."""

    def __init__(
        self, work: Any, explain: Explain, is_lost: Callable[[], bool] | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._explain = explain
        self._is_lost = is_lost
        self._failure: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it has been sent or received."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._is_lost is None:
                return self._wait(timeout)
            return bool(torchgroup.wait_in_thread(lambda: self._wait(timeout), self._is_lost))
        except (RuntimeError, torchgroup.Stuck) as failure:
            self._failure = self._explain(failure)
            raise self._failure from failure

    def _wait(self, timeout: timedelta | None) -> bool:
        return bool(self._work.wait() if not timeout else self._work.wait(timeout))

    def synchronize(self) -> None:
        """Nothing remains to be waited for on a CPU but the message itself."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, as far as Gloo says before `wait`."""
        return self._failure is not None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it is over, and well."""
        return self._failure is None and bool(self._work.is_success())

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._failure

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return list(self._work.result())

    def get_future(self) -> torch.futures.Future[Any]:
        """Gloo has none for messages, and says so."""
        future: torch.futures.Future[Any] = self._work.get_future()
        return future

    def _source_rank(self) -> int:
        return int(self._work._source_rank())
