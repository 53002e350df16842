"""Shutdown: ends the whole cluster, when asked or after it has been idle for long.

Stops what is alive, waits until the log says that it has ended, then asks the hosts' keepers to shut down. Called by the HTTP API and
by its own timer; with a run, a service or a queue entry alive it never begins by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable

from argosy.control.conductor import Conductor
from argosy.control.runstate import RunState
from argosy.errors import ClusterError

logger = logging.getLogger("argosy.controller")
DEFAULT_IDLE_SECONDS = 1800.0
_PATIENCE_SECONDS = 30.0
"""After so long of graceful stopping without a sign of a save that goes on the rest is killed."""

_KILL_SECONDS = 5.0


class Shutdown:
    """The end of one cluster."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._idle_seconds = _idle_seconds()
        self._last_activity = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        conductor.on_activity = self._noticed
        self._noticed()

    @property
    def is_begun(self) -> bool:
        """Whether the cluster is going down."""
        return self._task is not None

    def begin(self, reason: str) -> None:
        """Go down; again is fine."""
        if self._task is None:
            logger.info("shutting down: %s", reason)
            self._task = asyncio.create_task(self._go_down(reason))

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _noticed(self) -> None:
        self._last_activity = time.monotonic()
        if self._timer is None and self._idle_seconds > 0 and self._conductor.tally.is_idle:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._idle_seconds, self._look)

    def _look(self) -> None:
        """The timer is over: go down, or wait for what is left of the idle time since the last activity."""
        self._timer = None
        if not self._conductor.tally.is_idle:
            # The end of the last run sets it again.
            return
        left = self._last_activity + self._idle_seconds - time.monotonic()
        if left <= 0:
            self.begin(f"idle for {self._idle_seconds:.0f} s")
        else:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)

    async def _go_down(self, reason: str) -> None:
        try:
            try:
                await self._stop_all(reason)
            except ClusterError as error:
                # The log cannot be written: the keepers end everything, and their exit records tell it later.
                logger.warning("shutting down: %s", error.what)
            for host in self._conductor.links.hosts():
                await self._conductor.links.ask(host, "shutdown", {}, timeout_seconds=30)
        except ClusterError as error:
            logger.warning("shutting down: %s", error.what)
        finally:
            # A keeper that obeyed ends this process, too; one that could not be asked leaves the cluster as it is.
            self._task = None

    async def _stop_all(self, reason: str) -> None:
        began, runs = self._conductor.now(), self._conductor.coordinator.runs
        await self._conductor.stop_runs(None, hard=False, reason=reason)
        while (left := patience_ends_at(runs.values(), began) - self._conductor.now()) > 0:
            if await self._has_ended_within(left):
                return
        await self._conductor.stop_runs(None, hard=True, reason=reason)
        await self._has_ended_within(_KILL_SECONDS)

    async def _has_ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._wait_ended()
        except TimeoutError:
            return False
        return True

    async def _wait_ended(self) -> None:
        log = self._conductor.log
        while not self._conductor.tally.is_idle:
            await log.wait_beyond(log.last_seq)
        # Not by the highest number: what is pending may be batches without an event, which never raise it.
        await log.append([])


def patience_ends_at(runs: Iterable[RunState], began: float) -> float:
    """When those that were told to end then are killed: who saves, and tells that it goes on, is waited for."""
    living = (each for run in runs for role in run.order for each in role.alive())
    return max([began, *(each.advanced_at for each in living)]) + _PATIENCE_SECONDS


def _idle_seconds() -> float:
    """From ARGOSY_IDLE_SECONDS; 0: never."""
    text = os.environ.get("ARGOSY_IDLE_SECONDS", "")
    try:
        return max(0.0, float(text)) if text else DEFAULT_IDLE_SECONDS
    except ValueError:
        logger.warning("ARGOSY_IDLE_SECONDS=%r is not a number", text)
        return DEFAULT_IDLE_SECONDS
