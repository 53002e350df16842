"""The agent process of one host: the I/O around HostSide. Started and restarted by the keeper.

    python -m argosy.control.agent --directory D --runtime R

It carries messages between controller and keeper, asks probes, indexes output, and holds duplicates of the keeper's arenas and blobs. It
may be killed at any moment. When its keeper dies it sweeps, starts a new one, hands the duplicates over, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections import deque
from typing import Any

from argosy.control.errands import Errands, Roster
from argosy.control.guests import Guests
from argosy.control.home import Cluster
from argosy.control.hostside import HostOutputs, HostSide
from argosy.control.keeperlink import Frame, Held, KeeperLink
from argosy.control.launchenv import LaunchEnvironments
from argosy.control.logindex import LogIndex
from argosy.control.presence import LifeWatch, take_lock
from argosy.control.probes import Probes
from argosy.errors import ArgosyError, ClusterError, ProtocolError
from argosy.native import isa
from argosy.protocol.channel import Channel, Refused, agent_channel
from argosy.protocol.messages import Answer, Ask, FromAgent, FromController, Launch, Wants

logger = logging.getLogger("argosy.agent")
_LIST_ID = 0
"""Id of the request for what the keeper holds; the decider's ids begin above."""
_FIRST_PAUSE = 0.02
_MOST_PAUSE = 1.0
_WATCH_SECONDS = 0.03


class Agent:
    """Everything of one agent process."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._side = HostSide(
            host=os.uname().nodename,
            cpus=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            secret=os.urandom(16).hex(),
        )
        self._held = Held()
        self._link: KeeperLink | None = None
        self._channel: Channel[FromController | Refused] | None = None
        self._roster = Roster()
        self._environments = LaunchEnvironments(self._held.read_blob)
        self._guests = Guests(self._get_link, self._environments)
        self._errands = Errands(
            self._get_link, self._roster, self._environments, self._guests, self.statistics
        )
        self._index = LogIndex(self._disk_is_full)
        self._probes = Probes(self._probed, self._guests.probe)
        self._waiting: deque[Frame] = deque()
        """Frames to the keeper behind a spawn whose environment is being fetched."""
        self._unwatched: dict[str, Launch] = {}
        """Attempts whose output is not yet watched."""
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped = asyncio.Event()
        self._is_succeeding = False
        self._listed = asyncio.Event()
        self._clock_offset = time.time() - time.monotonic()

    async def run(self) -> int:
        """Work until told to end; the exit code."""
        self._loop.add_signal_handler(signal.SIGTERM, self._asked_to_end)
        self._loop.add_signal_handler(signal.SIGINT, self._asked_to_end)
        # Asked for once, beside everything else, so that no launch has to wait for the answer.
        self._loop.run_in_executor(None, isa.cap)
        self._begin(self._keep_keeper())
        self._begin(self._keep_controller())
        await self._stopped.wait()
        for task in list(self._tasks):
            task.cancel()
        self._probes.close()
        self._index.close()
        if self._link is not None:
            self._link.close()
        if self._channel is not None:
            self._channel.close()
        return 0

    def now(self) -> float:
        """Wall-clock seconds that never jump while this process lives."""
        return time.monotonic() + self._clock_offset

    def statistics(self) -> dict[str, Any]:
        """Counts for people."""
        return {
            "pid": os.getpid(),
            "most_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            "num_held": len(self._held),
            "num_processes": len(self._roster.pids),
            **self._index.statistics(),
        }

    # The keeper.

    async def _keep_keeper(self) -> None:
        pause = _FIRST_PAUSE
        while not self._is_succeeding:
            try:
                link = await KeeperLink.connect(self._cluster.keeper_socket, self._held)
            except (ClusterError, ProtocolError) as error:
                logger.warning("%s", error.what)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE)
                continue
            pause = _FIRST_PAUSE
            logger.info("connected to keeper %s (pid %d)", link.keeper, link.pid)
            watch = LifeWatch(link.pid, self._keeper_died)
            self._link = link
            self._waiting.clear()
            link.start(self._from_keeper)
            link.send({"type": "list", "id": _LIST_ID})
            await link.closed
            self._link = None
            if not self._is_succeeding:
                # Either it is dying, and its pidfd will say so, or it dropped this agent and a new link is needed.
                logger.warning("the link to the keeper ended")
                await asyncio.sleep(pause)
                watch.close()

    def _get_link(self) -> KeeperLink:
        if self._link is None:
            raise ClusterError("the agent has no keeper at the moment", fix="try again in a moment")
        return self._link

    def _from_keeper(self, frame: Frame) -> None:
        kind = frame.get("type")
        if kind == "event":
            event = frame["event"]
            self._roster.seen(event)
            self._guests.seen(event)
            if event.get("event") == "exited":
                self._end_watches(str(event.get("attempt")))
            self._apply(self._side.keeper_event(self.now(), int(frame["number"]), event))
        elif kind == "reply" and frame.get("id") == _LIST_ID:
            self._take_list(frame)
        elif kind == "reply":
            self._apply(self._side.keeper_reply(self.now(), int(frame["id"]), frame))
        elif kind == "error":
            logger.warning("the keeper says: %s", frame.get("what"))

    def _take_list(self, frame: Frame) -> None:
        link = self._get_link()
        attempts = list(frame.get("attempts") or [])
        self._roster.listed(attempts)
        self._guests.listed(attempts)
        runs = {str(arena["run"]) for arena in frame.get("arenas") or []}
        runs |= set(frame.get("ports") or {})
        self._apply(self._side.keeper_connected(self.now(), link.keeper, link.pid, attempts, runs))
        self._listed.set()

    def _send_keeper(self, frame: Frame) -> None:
        """In order; a spawn whose environment is not at hand holds up what comes after it."""
        self._waiting.append(frame)
        if len(self._waiting) == 1:
            self._drain()

    def _drain(self) -> None:
        while self._waiting and self._link is not None:
            frame = self._waiting[0]
            if frame["type"] == "spawn":
                missing = self._environments.missing(frame)
                if missing:
                    self._begin(self._fetch(missing))
                    return
                frame = self._environments.complete(frame)
            self._waiting.popleft()
            self._link.send(frame)

    async def _fetch(self, name: str) -> None:
        try:
            reply = await self._get_link().ask({"type": "get_blob", "name": name})
            self._environments.learn(name, str(reply["data"]))
        except ClusterError as error:
            logger.warning("environment %s cannot be had: %s", name, error.what)
        if self._waiting and self._environments.missing(self._waiting[0]):
            # The keeper will say what is wrong with the order.
            frame = self._waiting.popleft()
            if self._link is not None:
                self._link.send(frame)
        self._drain()

    def _keeper_died(self) -> None:
        if not self._is_succeeding and not self._stopped.is_set():
            self._is_succeeding = True
            logger.warning("the keeper has died")
            self._begin(self._succeed())

    async def _succeed(self) -> None:
        """A new keeper, with everything of the old one that this agent holds."""
        from argosy.control.succession import replace_keeper

        try:
            await self._loop.run_in_executor(None, replace_keeper, self._cluster, self._held)
        except (OSError, ArgosyError) as error:
            logger.error("the keeper could not be replaced: %s", error)
        self._stopped.set()

    def _asked_to_end(self) -> None:
        # The new keeper ends what it finds of the old one; what it is being handed comes first.
        if not self._is_succeeding:
            self._stopped.set()

    # The controller.

    async def _keep_controller(self) -> None:
        await self._listed.wait()
        pause = _FIRST_PAUSE
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._cluster.control_socket)
            except OSError as error:
                logger.info("the controller does not answer: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE)
                continue
            channel = agent_channel(reader, writer)
            self._channel = channel
            began = time.monotonic()
            try:
                self._apply(self._side.controller_connected(self.now()))
                await self._listen(channel)
            except ProtocolError as error:
                logger.warning("the link to the controller: %s", error.what)
                channel.close()
            self._channel = None
            channel.close()
            self._side.controller_disconnected(self.now())
            self._set_timer()
            pause = _FIRST_PAUSE if time.monotonic() - began > _MOST_PAUSE else 2 * pause
            await asyncio.sleep(min(pause, _MOST_PAUSE))

    async def _listen(self, channel: Channel[FromController | Refused]) -> None:
        while (message := await channel.receive()) is not None:
            if isinstance(message, Refused):
                raise ProtocolError(message.what, fix=message.fix)
            if isinstance(message, Ask):
                self._begin(self._answer(channel, message))
                continue
            if isinstance(message, Wants):
                for want in message.wants:
                    if want.launch is not None:
                        self._roster.launches[want.attempt] = want.launch
            self._apply(self._side.receive(self.now(), message))

    async def _answer(self, channel: Channel[FromController | Refused], ask: Ask) -> None:
        answer = await self._errands.answer(ask)
        if channel.is_closing:
            return
        try:
            channel.send(answer)
        except ProtocolError as error:
            # Too long: whoever asked is told, and nothing else suffers.
            channel.send(
                Answer(id=ask.id, ok=False, error=f"the answer to `{ask.verb}`: {error.what}")
            )

    # The decider.

    def _apply(self, outputs: HostOutputs) -> None:
        for frame in outputs.to_keeper:
            self._send_keeper(frame)
        self._tell_controller(outputs.to_controller)
        for attempt in outputs.forget:
            self._end_watches(attempt)
            self._roster.forget(attempt)
        for launch in outputs.watch_logs:
            self._roster.launches.setdefault(launch.attempt, launch)
            self._unwatched[launch.attempt] = launch
        if outputs.watch_logs:
            # Not now: the processes that are being started need the CPU more.
            self._loop.call_later(_WATCH_SECONDS, self._watch_outputs)
        for attempt, probe, launch in outputs.probes:
            self._probes.begin(attempt, probe, launch, began=self._roster.began(attempt))
        self._set_timer()

    def _tell_controller(self, messages: list[FromAgent]) -> None:
        """Send if there is a controller that reads; the decider says again what was not acknowledged."""
        channel = self._channel
        if channel is None or channel.is_closing:
            return
        try:
            for message in messages:
                channel.send(message)
        except ProtocolError as error:
            logger.warning("the link to the controller: %s", error.what)
            channel.close()

    def _watch_outputs(self) -> None:
        while self._unwatched:
            _, launch = self._unwatched.popitem()
            paths = [launch.stdout, launch.stderr]
            self._index.watch(launch.attempt, launch.run, paths, launch.log_bytes)

    def _end_watches(self, attempt: str) -> None:
        if attempt in self._unwatched:
            self._watch_outputs()
        self._probes.cancel(attempt)
        self._index.forget(attempt)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._side.deadline()
        if deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._apply(self._side.tick(self.now()))

    def _probed(self, attempt: str, is_ready: bool, why: str) -> None:
        self._apply(self._side.probed(self.now(), attempt, is_ready, why))

    def _disk_is_full(self, run: str, attempt: str, text: str) -> None:
        logger.warning("run %s: %s", run, text)
        # Said later: this may come from within a step of the decider.
        self._loop.call_soon(lambda: self._apply(self._side.note(self.now(), run, attempt, text)))

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A bug of ours: a fresh agent, which asks keeper and controller anew, is the best that can follow.
            logger.error("the agent ends", exc_info=task.exception())
            self._stopped.set()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="argosy-agent")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--runtime", required=True)
    options = parser.parse_args()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s",
    )
    cluster = Cluster(options.directory, options.runtime)
    try:
        take_lock(cluster.lock("agent"), "agent")
        gc.freeze()
        return asyncio.run(_run(cluster))
    except ArgosyError as error:
        logger.error("%s", error)
        return error.exit_code
    except Exception:
        logger.exception("the agent failed")
        return 70


async def _run(cluster: Cluster) -> int:
    return await Agent(cluster).run()


if __name__ == "__main__":
    sys.exit(main())
