"""Conductor: the I/O around the Coordinator. It feeds it messages, time and requests, and carries out what it decides.

One order for everything: the coordinator's events are made durable, then its messages go out, in the order in which they were
decided. The HTTP API and the controller's entry point call it; it decides nothing by itself, and knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from argosy.config.checks import check_spec
from argosy.config.spec import RoleSpec, Submission
from argosy.control.agentlinks import AgentLinks
from argosy.control.attempts import Role
from argosy.control.blobs import Blobs
from argosy.control.commands import RunStopping, check_room
from argosy.control.coordinator import Coordinator, Outputs
from argosy.control.eventlog import EventLog, run_of
from argosy.control.evidence import Evidence
from argosy.control.expiry import Expiry
from argosy.control.faults import FaultOrder, choose_role, settle_steps
from argosy.control.home import Cluster, check_space
from argosy.control.placement import num_processes
from argosy.control.rundirs import make_run_directory, write_end
from argosy.control.tally import Tally
from argosy.errors import ClusterError, ConfigError, NotFoundError
from argosy.protocol.facts import (
    AttemptSuspected,
    Event,
    FaultInjected,
    Note,
    RunEnded,
    RunsForgotten,
    RunSubmitted,
)
from argosy.protocol.messages import FromController, Hello, Report

logger = logging.getLogger("argosy.controller")
T = TypeVar("T")
_LOG_PATIENCE_SECONDS = 1.0
_FEW_PROCESSES = 32
"""A run with more is accepted only after a look at what the hosts can hold."""
_INLINE_DIRECTORIES = 4
"""Up to so many run directories are made in place; more of them (arrays) in a thread."""


class _Outgoing(msgspec.Struct):
    ready: asyncio.Future[Any]
    messages: list[tuple[str, FromController]]


class Conductor:
    """One per controller."""

    def __init__(
        self, cluster: Cluster, log: EventLog, *, agent_wait_seconds: float = 20.0
    ) -> None:
        self.cluster = cluster
        self.log = log
        self.coordinator = Coordinator(
            runs_directory=cluster.runs, seed=os.urandom(8).hex(), gaps_below=log.mark
        )
        self.tally = Tally()
        self.blobs = Blobs(self.tally)
        self.links = AgentLinks(self._received, self._left)
        self.evidence = Evidence(self.links, cluster.runs, self._keep_evidence)
        self.expiry = Expiry(cluster, lambda run: run in self.coordinator.runs, self.now)
        self._began = time.monotonic()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an exception when the log refused an event or a decision broke off: the controller must end and be started again."""
        self.on_activity: Callable[[], None] = lambda: None
        """Called after everything that may have changed whether the cluster is idle."""
        self._agent_wait_seconds = agent_wait_seconds
        self._outbox: deque[_Outgoing] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._clock_offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Wall-clock seconds that never jump while this process lives."""
        return time.monotonic() + self._clock_offset

    def uptime_seconds(self) -> float:
        """Seconds since this controller started."""
        return time.monotonic() - self._began

    def replay(self) -> int:
        """Rebuild all state from the log; the number of events."""
        count = 0
        ends = []
        for event in self.log.replay():
            self.coordinator.replay(event)
            self.tally.apply(event)
            count += 1
            if isinstance(event.fact, RunEnded):
                ends.append(event)
        for run, why in self.coordinator.unreadable.items():
            logger.error("run %s cannot be read from the log and is put aside: %s", run, why)
        self.tally.unneeded.clear()  # forgotten long ago
        self._write_ends(ends)  # the last of them may be missing
        return count

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of an agent."""
        await self.links.serve(reader, writer)

    def apply(self, outputs: Outputs) -> asyncio.Future[Any]:
        """Make durable, then send; the future is done when the events are durable."""
        for event in outputs.events:
            self.tally.apply(event)
            if isinstance(event.fact, AttemptSuspected):
                self.evidence.take(self.coordinator.runs[event.fact.run], event.fact)
            elif isinstance(event.fact, RunsForgotten):
                self.expiry.look()
        ready = self._make_ready(outputs.events)
        if ready.done() and not self._outbox:
            self._send(outputs.messages)
        else:
            self._outbox.append(_Outgoing(ready, outputs.messages))
            ready.add_done_callback(self._flush)
        if ends := [event for event in outputs.events if isinstance(event.fact, RunEnded)]:
            ready.add_done_callback(lambda done: self._write_ends(ends, done))
        if unneeded := self.blobs.take_unneeded():
            ready.add_done_callback(lambda done: self._drop_blobs(unneeded, done))
        self._set_timer()
        self.on_activity()
        return ready

    async def submit(
        self,
        submission: Submission,
        *,
        has_left: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[dict[str, str]]:
        """Accept runs: values to the keepers, then the decision, durable; ConfigError, ClusterError or HomeError when refused.

        `has_left` tells whether the client is gone: then nobody would know of the runs, and there are none.
        """
        check_spec(submission.spec)
        await self._check_log()
        check_space(self.cluster.home)
        await self.wait_for_agent()
        check_room(submission.spec, self.coordinator.placement)
        if not submission.spec.queued:
            roles = submission.spec.roles.values()
            await self._check_hosts([(role, num_processes(role)) for role in roles])
        for name, role in submission.spec.roles.items():
            await self._check_cpus(f"roles.{name}.cpus", role.cpus or [])
        pinned: list[str] = []
        try:
            env_blob = await self._put_environment(submission.env, pinned)
            role_env_blobs = {
                name: await self._put_environment({**submission.env, **role.env}, pinned)
                for name, role in submission.spec.roles.items()
                if role.env
            }
            secret_blobs = {
                name: await self._put_blob(value, pinned)
                for name, value in submission.secrets.items()
            }
            if has_left is not None and await has_left():
                raise ClusterError("the client has left before its run was accepted")
            runs, outputs = self._ask_decider(
                self.coordinator.submit,
                submission,
                env_blob=env_blob,
                secret_blobs=secret_blobs,
                role_env_blobs=role_env_blobs,
            )
            durable = self.apply(outputs)
        finally:
            self.blobs.unpin(pinned)
        names = {
            event.fact.run: event.fact.name
            for event in outputs.events
            if isinstance(event.fact, RunSubmitted)
        }
        await self._durable(durable)
        if has_left is not None and await has_left():
            # Meanwhile: a second Ctrl-C does not wait for the answer.
            reason = "the client has left before it heard of its run"
            await self.stop_runs(set(runs), hard=True, reason=reason)
        return [{"run": run, "name": names.get(run, "")} for run in runs]

    async def stop(
        self,
        run: str,
        *,
        hard: bool,
        reason: str,
        role: str | None = None,
        index: int | None = None,
    ) -> str:
        """Ask a run, role or process to end; the command's id once that is durable."""
        await self._check_log()
        command, outputs = self._ask_decider(
            self.coordinator.stop, run, hard=hard, reason=reason, role=role, index=index
        )
        await self._durable(self.apply(outputs))
        return command

    async def stop_runs(
        self, words: set[str] | None, *, hard: bool, reason: str
    ) -> list[RunStopping]:
        """Ask all runs that are alive, or those of these ids, names and arrays, to end; they, once that is durable."""
        await self._check_log()
        asked, outputs = self._ask_decider(
            self.coordinator.stop_runs, words, hard=hard, reason=reason
        )
        await self._durable(self.apply(outputs))
        return asked

    async def scale(self, run: str, size: int, *, role: str | None, may_restart: bool) -> str:
        """Give a gang another size; the command's id once that is durable."""
        await self._check_log()
        supervisor = self.coordinator.runs.get(run)
        if supervisor is not None:
            gang = choose_role(supervisor.roles, role)
            await self._check_hosts([(gang.spec, max(0, size - len(gang.alive())))])
        command, outputs = self._ask_decider(
            self.coordinator.scale, run, size, role=role, may_restart=may_restart
        )
        await self._durable(self.apply(outputs))
        return command

    async def inject(self, run: str, orders: list[FaultOrder]) -> list[FaultInjected]:
        """Record faults on purpose; those that are not told to a rank are still to be carried out."""
        await self._check_log()
        orders = await self._settle_steps(run, orders)
        faults, outputs = self._ask_decider(self.coordinator.inject, run, orders)
        await self._durable(self.apply(outputs))
        return faults

    async def _settle_steps(self, run: str, orders: list[FaultOrder]) -> list[FaultOrder]:
        """The steps that are meant; ConfigError for one that its gang has behind it. What else is wrong with a fault is for the coordinator to say."""
        supervisor = self.coordinator.runs.get(run)
        if supervisor is None or supervisor.ended is not None:
            return orders
        presents = {
            name: await self._present_step(choose_role(supervisor.roles, name))
            for name in {order.role: None for order in orders if order.step is not None}
        }
        return settle_steps(orders, presents)

    async def _present_step(self, role: Role) -> int:
        """The step that the furthest process of a gang has told its agent; 0 when none has told one."""
        data = {"attempts": [attempt.id for attempt in role.alive()]}
        answers = [await self.links.ask(host, "steps", data) for host in self.links.hosts()]
        return max((step for answer in answers for step in answer["steps"].values()), default=0)

    def _keep_evidence(self, attempt: str, path: str, error: str) -> None:
        if not self.failed.done():
            outputs = self._ask_decider(
                self.coordinator.keep_evidence, attempt, path=path, error=error
            )
            self.apply(outputs)

    def note(self, note: Note) -> None:
        """Put something a person should know into the log."""
        logger.warning("%s", note.text)
        self.apply(self._ask_decider(self.coordinator.note, note))

    async def wait_for_agent(self) -> None:
        """Return when an agent is connected (a cluster that just starts needs a moment); ClusterError after too long."""
        try:
            async with asyncio.timeout(self._agent_wait_seconds):
                await self.links.wait_connected()
        except TimeoutError:
            raise ClusterError(
                f"no agent has connected within {self._agent_wait_seconds:.0f} s",
                fix=f"see {self.cluster.log('agent')} and {self.cluster.log('keeper')}",
            ) from None

    async def _check_hosts(self, wanted: list[tuple[RoleSpec, int]]) -> None:
        """ConfigError for so many processes of roles, more than any host can hold now: started one by one, they would fail one by one."""
        pythons = sum(count for role, count in wanted if role.command is None)
        commands = sum(count for role, count in wanted if role.command is not None)
        if pythons + commands <= _FEW_PROCESSES:
            return
        data = {"commands": commands, "pythons": pythons}
        shortage: dict[str, Any] = {}
        for host in self.links.hosts():
            try:
                shortage = await self.links.ask(host, "room", data)
            except ClusterError as error:
                logger.info("host %s does not say what room it has: %s", host, error.what)
                shortage = {}
            if not shortage:
                return
        if shortage:
            what = f"{pythons + commands} processes are too many; {shortage['what']}"
            raise ConfigError(what, fix=str(shortage["fix"]))

    async def _check_cpus(self, where: str, cpus: list[int]) -> None:
        """ConfigError for CPUs that processes are to be pinned to and that no host has."""
        answer: dict[str, Any] = {}
        for host in self.links.hosts() if cpus else ():
            try:
                answer = await self.links.ask(host, "cpus", {"cpus": cpus})
            except ClusterError as error:
                logger.info("host %s does not say which CPUs it has: %s", host, error.what)
                return
            if not answer["unusable"]:
                return
        if answer:
            raise ConfigError(
                f"{where} names CPU {answer['unusable'][0]}, which no host has",
                fix=f"use some of {', '.join(map(str, answer['usable']))}",
            )

    async def wait_durable(self) -> None:
        """Return when all that has been decided so far is durable. While the disk refuses, or after a second, what is known may be told."""
        seq = self.coordinator.seq
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOG_PATIENCE_SECONDS):
                while self.log.last_seq < seq and not self.log.trouble:
                    await self.log.wait_beyond(self.log.last_seq)

    async def _durable(self, ready: asyncio.Future[Any]) -> None:
        """Wait for what `apply` gave; ClusterError when the disk refuses for long, so that nobody waits without an answer."""
        while not (await asyncio.wait([ready], timeout=_LOG_PATIENCE_SECONDS))[0]:
            if self.log.trouble:
                raise ClusterError(
                    f"{self.log.trouble}; what was asked will be done when there is space",
                    fix=f"free some space on the disk of {self.cluster.directory}",
                )
        await ready

    async def _check_log(self) -> None:
        # Nothing can be promised while nothing can be made durable. Space that was just freed is found by the log's next attempt.
        deadline = time.monotonic() + _LOG_PATIENCE_SECONDS
        while self.log.trouble and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self.log.trouble:
            raise ClusterError(
                self.log.trouble, fix=f"free some space on the disk of {self.cluster.directory}"
            )

    def close(self) -> None:
        """Stop the timer and the links."""
        if self._timer is not None:
            self._timer.cancel()
        self.evidence.close()
        self.expiry.close()
        self.links.close()

    def statistics(self) -> dict[str, Any]:
        """Counts of log and links."""
        return {**self.log.statistics(), "num_waiting_messages": len(self._outbox)}

    async def _put_environment(self, environment: dict[str, str], pinned: list[str]) -> str:
        data = msgspec.json.encode(environment, order="sorted").decode()
        return await self._put_blob(data, pinned)

    async def _put_blob(self, data: str, pinned: list[str]) -> str:
        name = hashlib.sha256(data.encode()).hexdigest()
        self.blobs.pin(name, data)
        pinned.append(name)
        for host in self.links.hosts():
            await self.links.ask(host, "put_blob", {"name": name, "data": data})
        return name

    def _drop_blobs(self, names: list[str], durable: asyncio.Future[Any]) -> None:
        """Have the keepers forget values that no run needs any more, now that this is durable."""
        if durable.cancelled() or durable.exception() is not None:
            return
        hosts = self.links.hosts()
        if not hosts:
            self.blobs.put_back(names)
        for name in names:
            if not self.blobs.is_wanted(name):
                for host in hosts:
                    self.links.tell(host, "drop_blob", {"name": name})

    def _write_ends(self, ends: list[Event], durable: asyncio.Future[Any] | None = None) -> None:
        """Have the runs' directories say how they ended, in a thread: nobody waits for it."""
        if durable is None or (not durable.cancelled() and durable.exception() is None):
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, write_ends, self.cluster.runs, ends)

    async def _learn_blobs(self, host: str) -> None:
        """After a restart: what live runs need, from the keeper that has it."""
        for name in self.blobs.missing():
            try:
                answer = await self.links.ask(host, "get_blob", {"name": name})
            except ClusterError as error:
                logger.info("host %s: %s", host, error.what)
                continue
            self.blobs.learn(name, str(answer["data"]))

    def _received(self, host: str, message: Hello | Report) -> None:
        self.apply(self._ask_decider(self.coordinator.receive, host, message))
        if isinstance(message, Hello) and self.blobs.missing():
            task = asyncio.create_task(self._learn_blobs(host))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _ask_decider(self, ask: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """What the coordinator makes of an input now; a bug of ours in it ends the controller."""
        if self.failed.done():
            raise ClusterError("the controller is being restarted", fix="try again in a moment")
        try:
            return ask(self.now(), *arguments, **named)
        except (ConfigError, NotFoundError):
            raise  # refused before anything was decided
        except Exception as error:
            # The one door to the deciders: nothing half-decided may reach the log.
            logger.exception("the deciders failed")
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Memory is ahead of the log: only a new start from the log is right."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _left(self, host: str) -> None:
        self.coordinator.disconnected(self.now(), host)
        self._set_timer()

    def _make_ready(self, events: list[Event]) -> asyncio.Future[Any]:
        """Durable events, and directories for the runs that begin with them."""
        loop = asyncio.get_running_loop()
        submitted = [event.fact for event in events if isinstance(event.fact, RunSubmitted)]
        directories = None
        if 0 < len(submitted) <= _INLINE_DIRECTORIES:
            make_directories(self.cluster.runs, submitted)
        elif submitted:
            directories = loop.run_in_executor(None, make_directories, self.cluster.runs, submitted)
        if not events and not self.log.num_pending:
            done: asyncio.Future[Any] = loop.create_future()
            done.set_result(None)
            return done
        durable = self.log.append(events)
        return durable if directories is None else asyncio.gather(durable, directories)

    def _flush(self, _: asyncio.Future[Any]) -> None:
        while self._outbox and self._outbox[0].ready.done():
            outgoing = self._outbox.popleft()
            error = outgoing.ready.exception()
            if error is not None:
                self._fail(error)
                return
            self._send(outgoing.messages)

    def _send(self, messages: list[tuple[str, FromController]]) -> None:
        for host, message in messages:
            self.links.send(host, message)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.coordinator.deadline()
        if deadline is not None:
            delay = max(0.0, deadline - self.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.apply(self._ask_decider(self.coordinator.tick))


def make_directories(runs: str, submitted: list[RunSubmitted]) -> None:
    """Directories and spec files of new runs; a disk that refuses is a warning, the run may still work."""
    for fact in submitted:
        try:
            make_run_directory(os.path.join(runs, fact.run), fact)
        except OSError as error:
            logger.warning("the directory of run %s cannot be written: %s", fact.run, error)


def write_ends(runs: str, ends: list[Event]) -> None:
    """How runs ended, in their directories; a disk that refuses is a warning, the log has it too for some time."""
    for event in ends:
        try:
            write_end(os.path.join(runs, run_of(event)), event)
        except OSError as error:
            logger.warning("the end of run %s cannot be written: %s", run_of(event), error)
