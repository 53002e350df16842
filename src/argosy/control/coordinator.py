"""Coordinator: the controller without I/O. Commands and reports in; facts for the log and messages for hosts out.

One instance per cluster. It gives facts their place in the log, routes them to the supervisors and the queue, and keeps
for each host which wants it lacks. The same class runs behind sockets (controller.py) and in the simulator; it never
reads a clock. Messages of an `Outputs` may be sent only when its events are durable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from argosy.config.checks import check_spec
from argosy.config.spec import Submission
from argosy.control.attempts import Attempt
from argosy.control.clusterstate import BROKEN, ClusterState
from argosy.control.commands import (
    RunStopping,
    check_secrets,
    is_meant,
    name_of,
    target_of,
    without_values,
)
from argosy.control.faults import FaultOrder, check_order, choose_role, fault_of, victim_of
from argosy.control.hostwants import HostWants
from argosy.control.identity import run_id, run_of
from argosy.control.launching import MOST_IN_MESSAGE, pages_of, unlaunchable, wants_of
from argosy.control.observing import facts_of, leftovers, lost_with_old_keeper, note_of
from argosy.control.resizing import check_resize, place_additional
from argosy.control.retention import KEEP_ENDED
from argosy.control.supervisor import Supervisor
from argosy.errors import InvariantError, NotFoundError
from argosy.protocol.facts import (
    AnyFact,
    AttemptExited,
    CommandAccepted,
    CommandDone,
    Event,
    EvidenceKept,
    Fact,
    FaultInjected,
    GangResized,
    HostJoined,
    Note,
    RunAdmitted,
    RunEnded,
    RunSubmitted,
    StopRequested,
)
from argosy.protocol.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    FromController,
    Hello,
    Observed,
    Report,
    Welcome,
)

MOST_ROUNDS = 100_000
PUT_ASIDE = "the run is put aside, a bug of Argosy"
MOST_STORY_CHARACTERS, MOST_REASON_CHARACTERS = 16 << 10, 400


@dataclass(slots=True)
class Outputs:
    """What one input led to."""

    events: list[Event] = field(default_factory=list)
    """To be made durable in this order."""
    messages: list[tuple[str, FromController]] = field(default_factory=list)
    """(host, message), to be sent only after that."""


class Coordinator(ClusterState):
    """All runs, hosts and the queue of one cluster."""

    def __init__(
        self,
        *,
        runs_directory: str,
        seed: str = "",
        keep_ended: int = KEEP_ENDED,
        gaps_below: int = 0,
    ) -> None:
        """`seed` goes into run ids; `gaps_below`: the log has deleted events of forgotten runs, all below this number."""
        super().__init__(
            runs_directory=runs_directory, keep_ended=keep_ended, gaps_below=gaps_below
        )
        self.seed = seed
        self.most_in_message = MOST_IN_MESSAGE
        self._unconfirmed: dict[str, None] = {}
        """Hosts that were sent wants they have not confirmed."""
        self._deadlines: list[tuple[float, str]] = []
        self._outputs = Outputs()

    # --- inputs -------------------------------------------------------------------------------------------------

    def submit(
        self,
        now: float,
        submission: Submission,
        *,
        env_blob: str,
        secret_blobs: dict[str, str],
        role_env_blobs: dict[str, str] | None = None,
    ) -> tuple[list[str], Outputs]:
        """Accept a run, or the runs of an array; returns their ids. Raises ConfigError."""
        spec = submission.spec
        check_spec(spec)
        check_secrets(spec, secret_blobs)
        spec = without_values(spec)
        self._begin(now)
        name = spec.name or name_of(spec)
        command = f"c{self.seq + 1}"
        first = self._next_run()
        self._emit(now, CommandAccepted(command=command, verb="submit", target=name, about=first))
        runs: list[str] = []
        for index in range(spec.array) if spec.array else [None]:
            run = self._next_run()
            full_name = name if index is None else f"{name}[{index}]"
            self._emit(
                now,
                RunSubmitted(
                    run=run,
                    name=full_name,
                    spec=msgspec.structs.replace(spec, name=full_name),
                    env_blob=env_blob,
                    env_names=sorted(submission.env),
                    role_env_blobs=role_env_blobs or {},
                    cwd=submission.cwd,
                    umask=submission.umask,
                    limits=submission.limits,
                    affinity=submission.affinity,
                    python=submission.python,
                    secret_blobs=secret_blobs,
                    array_index=index,
                ),
            )
            runs.append(run)
        self._emit(now, CommandDone(command=command, outcome="ok", about=first))
        return runs, self._settle(now)

    def _next_run(self) -> str:
        return run_id(self.retention.num_submitted + 1, self.seed)

    def stop(
        self,
        now: float,
        run: str,
        *,
        hard: bool,
        reason: str,
        role: str | None = None,
        index: int | None = None,
    ) -> tuple[str, Outputs]:
        """End a run, a role or a process; returns the command's id, which is done when it has ended."""
        supervisor = self._find_run(run)
        target = target_of(supervisor, role, index)
        self._begin(now)
        command = self._request_stop(now, supervisor, target, hard=hard, reason=reason)
        return command, self._settle(now)

    def stop_runs(
        self, now: float, words: set[str] | None, *, hard: bool, reason: str
    ) -> tuple[list[RunStopping], Outputs]:
        """End all runs that are alive, or those of these ids, names and arrays, in one decision: none that waits is started meanwhile."""
        self._begin(now)
        asked = [
            RunStopping(
                run=supervisor.run,
                name=supervisor.submitted.name,
                command=self._request_stop(now, supervisor, run, hard=hard, reason=reason),
                was_queued=supervisor.admitted is None,
            )
            for run, supervisor in list(self.runs.items())
            if supervisor.ended is None
            and (words is None or is_meant(run, supervisor.submitted.name, words))
        ]
        return asked, self._settle(now)

    def _request_stop(
        self, now: float, supervisor: Supervisor, target: str, *, hard: bool, reason: str
    ) -> str:
        """Record that somebody wants the target to end; the command's id."""
        run, stop = supervisor.run, supervisor.stop
        command = f"c{self.seq + 1}"
        verb = "kill" if hard else "stop"
        self._emit(now, CommandAccepted(command=command, verb=verb, target=target, about=run))
        if supervisor.ended is None and target == run and (stop is None or hard > stop.hard):
            why = reason or f"{verb} was asked for"
            self._emit(now, StopRequested(run=run, hard=hard, reason=why))
        return command

    def scale(
        self, now: float, run: str, size: int, *, role: str | None = None, may_restart: bool = False
    ) -> tuple[str, Outputs]:
        """Give a gang another size; returns the command's id, which is done when the new generation has started."""
        supervisor = self._find_run(run)
        if supervisor.ended is not None:
            raise NotFoundError(
                f"run {run} has {supervisor.ended.outcome}", fix="start a new one: argosy run"
            )
        gang = choose_role(supervisor.roles, role)
        check_resize(supervisor, gang, size, may_restart=may_restart)
        hosts = place_additional(supervisor, gang, size, self.placement)
        self._begin(now)
        command = f"c{self.seq + 1}"
        target = f"{run}/{gang.name}"
        self._emit(now, CommandAccepted(command=command, verb="scale", target=target, about=run))
        self._emit(
            now,
            GangResized(run=run, role=gang.name, size=size, hosts=hosts, command=command),
        )
        return command, self._settle(now)

    def inject(
        self, now: float, run: str, orders: list[FaultOrder]
    ) -> tuple[list[FaultInjected], Outputs]:
        """Record faults, all or none; those that are not told to a rank are then to be carried out by the caller."""
        supervisor = self._find_run(run)
        if supervisor.ended is not None:
            raise NotFoundError(f"run {run} has {supervisor.ended.outcome}", fix="start a new one")
        victims: list[tuple[FaultOrder, Attempt | None]] = []
        for order in orders:
            check_order(order)
            role = None if order.part else choose_role(supervisor.roles, order.role)
            victims.append((order, victim_of(role, order) if role is not None else None))
        self._begin(now)
        faults = []
        for order, victim in victims:
            fault = fault_of(run, self.seq + 1, order, victim)
            self._emit(now, fault)
            faults.append(fault)
        return faults, self._settle(now)

    def keep_evidence(self, now: float, attempt: str, *, path: str, error: str) -> Outputs:
        """Stacks of a suspect's gang are kept, or could not be had: it may be killed now."""
        supervisor = self.runs.get(run_of(attempt))
        known = supervisor.attempts.get(attempt) if supervisor is not None else None
        self._begin(now)
        is_news = known is not None and not known.has_evidence
        if supervisor is not None and supervisor.ended is None and is_news:
            fact = EvidenceKept(attempt=attempt, run=supervisor.run, path=path, error=error)
            self._emit(now, fact)
        return self._settle(now)

    def note(self, now: float, note: Note) -> Outputs:
        """Record something a person should know."""
        self._begin(now)
        self._emit(now, note)
        return self._settle(now)

    def receive(self, now: float, host: str, message: Hello | Report) -> Outputs:
        """Take what a host said."""
        self._begin(now)
        if isinstance(message, Hello):
            self._greet(now, host, message)
        else:
            self._hear(now, host, message)
        return self._settle(now)

    def disconnected(self, now: float, host: str) -> None:
        """The host's link is gone; nothing follows from that until it comes back."""
        if host in self.hosts:
            self.hosts[host].connected = False

    def tick(self, now: float) -> Outputs:
        """Do what has become due: restarts after a wait, wants sent again."""
        self._begin(now)
        while self._deadlines and self._deadlines[0][0] <= now:
            _at, run = heappop(self._deadlines)
            if run in self.runs:
                self._dirty[run] = None
        for host in self._unconfirmed:
            at = self.hosts[host].resend_at
            if at is not None and at <= now:
                self.hosts[host].sent = self.hosts[host].confirmed
                self._touched[host] = None
        return self._settle(now)

    def deadline(self) -> float | None:
        """When `tick` is next due."""
        hosts = self.hosts
        times = [at for host in self._unconfirmed if (at := hosts[host].resend_at) is not None]
        if self._deadlines:
            times.append(self._deadlines[0][0])
        if self._dirty or not self._has_resumed:
            return 0.0
        return min(times, default=None)

    # --- hosts --------------------------------------------------------------------------------------------------

    def _greet(self, now: float, host: str, hello: Hello) -> None:
        state = self.hosts.get(host)
        if state is not None and hello.keeper in state.past_keepers:
            return  # late word of a keeper that is gone
        is_same = state is not None and (state.keeper, state.cpus, state.memory_bytes) == (
            hello.keeper,
            hello.cpus,
            hello.memory_bytes,
        )
        if not is_same:
            self._emit(
                now,
                HostJoined(
                    host=host,
                    keeper=hello.keeper,
                    cpus=hello.cpus,
                    memory_bytes=hello.memory_bytes,
                    pid=hello.pid,
                ),
            )
        state = self.hosts[host]
        state.pid = hello.pid
        state.seen_at = now
        state.connect()
        for lost in lost_with_old_keeper(self.runs, state, now):
            self._emit(now, lost)
        self._release_leftovers(now, state, hello)
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            keeper=hello.keeper,
            acknowledged=self._cursors.get(hello.keeper, 0),
        )
        self._outputs.messages.append((host, welcome))
        self._touched[host] = None

    def _release_leftovers(self, now: float, state: HostWants, hello: Hello) -> None:
        attempts, runs = leftovers(self.runs, hello)
        if not attempts and not runs:
            return
        # The note also gives these wants a version that the host has not seen.
        text = (
            f"{state.host} still held {len(attempts)} processes and {len(runs)} runs that are over"
        )
        self._emit(now, Note(text=text))
        self._touched[state.host] = None
        for name in attempts:
            state.touch_attempt(name, self.seq)
            state.finish(name, self.seq)
        for run in runs:
            state.touch_run(run, self.seq)
            state.finish(run, self.seq)

    def _hear(self, now: float, host: str, report: Report) -> None:
        state = self.hosts.get(host)
        if state is None:
            return  # it has not said hello to this controller yet
        state.seen_at = now
        source = report.keeper
        cursor = self._cursors.get(source, 0)
        for observed in report.observed:
            if observed.number <= cursor:
                continue
            cursor = observed.number
            supervisor = self.runs.get(observed.run or run_of(observed.attempt))
            if supervisor is None:
                if observed.kind == "note":
                    self._emit(now, note_of(observed), (source, observed.number))
                continue
            self._take(now, state, supervisor, source, observed)
        if report.observed:
            self._cursors[source] = cursor
            self._outputs.messages.append((host, Acknowledge(keeper=source, number=cursor)))
        if source == state.keeper or source not in state.past_keepers:
            state.confirm(report.wants_version)
            if state.confirmed >= state.version:
                self._unconfirmed.pop(host, None)

    def _take(
        self, now: float, state: HostWants, supervisor: Supervisor, source: str, observed: Observed
    ) -> None:
        """One observation of a run; one that cannot be taken would come again for ever, so the run is put aside."""
        try:
            for fact in facts_of(supervisor, state.host, source, observed, now):
                self._emit(now, fact, (source, observed.number))
                if isinstance(fact, Note) and observed.kind == "started":
                    self._end_again(state, fact.attempt)
        except BROKEN as error:
            self._put_aside(now, supervisor, f"{observed}: {error!r}", (source, observed.number))

    def _end_again(self, state: HostWants, name: str) -> None:
        """An attempt that has ended for the log turned up alive: the host is told to end it."""
        attempt = self.runs[run_of(name)].attempts.get(name)
        if attempt is not None and not attempt.is_alive:
            self._touched[state.host] = None
            state.touch_attempt(name, self.seq)
            state.finish(name, self.seq)

    def _send_wants(self, now: float, state: HostWants) -> None:
        message = wants_of(state, self.runs, self.runs_directory)
        pages = pages_of(message, self.most_in_message)
        self._outputs.messages += [(state.host, page) for page in pages]
        state.sent = state.version
        state.sent_at = now
        self._unconfirmed[state.host] = None

    # --- facts --------------------------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Start an input; the first one after a replay finishes what the old controller left open."""
        if self._has_resumed:
            return
        self._has_resumed = True
        self._is_queue_dirty = True
        for run, why in self.unreadable.items():
            supervisor = self.runs.get(run)
            if supervisor is None:
                self._end_unknown(now, run, why)
            elif supervisor.ended is None:
                self._put_aside(now, supervisor, why)
        for command, (verb, _target, run) in list(self.pending.items()):
            if verb == "submit":
                outcome = "interrupted: the controller was restarted"
                self._emit(now, CommandDone(command=command, outcome=outcome, about=run))

    def _emit(self, now: float, fact: Fact, source: tuple[str, int] | None = None) -> None:
        event = Event(seq=self.seq + 1, at=now, fact=_any(fact), source=source)
        try:
            self._fold(event)
        except BROKEN:
            self.seq = event.seq - 1  # it does not enter the log
            raise
        self._outputs.events.append(event)

    def _put_aside(
        self, now: float, supervisor: Supervisor, why: str, source: tuple[str, int] | None = None
    ) -> None:
        """End a run that the deciders cannot go on with, its story in the log: one run's trouble is not the cluster's."""
        if any(event.source == source for event in self._outputs.events):
            source = None
        reason = self._tell_story(now, supervisor.run, why, source)
        if supervisor.ended is None:
            try:
                self._end_all(now, supervisor, reason)
            except BROKEN as error:
                # Not even its end can be folded: from here on only the end counts, as it will in a replay.
                self.unreadable[supervisor.run] = repr(error)
                self._emit(now, _failed(supervisor.run, reason))
        for command in list(supervisor.commands):
            self._emit(now, CommandDone(command=command, outcome=reason, about=supervisor.run))
        self._dirty.pop(supervisor.run, None)

    def _end_all(self, now: float, supervisor: Supervisor, reason: str) -> None:
        run = supervisor.run
        for role in supervisor.order:
            for attempt in role.alive():
                self._emit(
                    now,
                    AttemptExited(attempt=attempt.id, run=run, lost=True, error=reason, at=now),
                )
        self._emit(now, _failed(run, reason))

    def _end_unknown(self, now: float, run: str, why: str) -> None:
        """End a run of which not even the submission can be read; its processes are leftovers when their host says hello."""
        if not self.retention.has_ended(run):
            self._emit(now, _failed(run, self._tell_story(now, run, why)))

    def _tell_story(
        self, now: float, run: str, why: str, source: tuple[str, int] | None = None
    ) -> str:
        """Why a run is put aside, as a note with all of it; the short of it."""
        text = f"{PUT_ASIDE}: {why}"
        note = Note(run=run, level="error", text=text[:MOST_STORY_CHARACTERS])
        self._emit(now, note, source)
        return text.partition("\n")[0][:MOST_REASON_CHARACTERS]

    def _forget(self, now: float) -> bool:
        """Forget the oldest of the ended runs, when there are clearly too many."""
        chosen = self.retention.choose(
            lambda run: run in self.runs and bool(self.runs[run].commands)
        )
        if chosen:
            self._emit(now, self.memory(chosen))
        return bool(chosen)

    def _settle(self, now: float) -> Outputs:
        """Decide until nothing follows any more, then tell the hosts."""
        # After a replay, or when all are stopped at once, every run that is known may have its turns: to end, to finish a command, to be done.
        for _ in range(MOST_ROUNDS + 4 * len(self.runs)):
            if self._dirty:
                run = next(iter(self._dirty))
                del self._dirty[run]
                self._decide_run(now, self.runs[run])
            elif self._is_queue_dirty:
                self._admit_next(now)
            elif not self._forget(now):
                break
        else:
            raise InvariantError(f"the decisions of {MOST_ROUNDS} rounds never settled")
        if not self._tell_hosts(now):
            return self._settle(now)
        outputs, self._outputs = self._outputs, Outputs()
        return outputs

    def _admit_next(self, now: float) -> None:
        """Admit the best of the waiting runs, if there is room; one that cannot be placed or admitted is put aside."""
        try:
            admission = self.queue.next_admission()
        except BROKEN:
            broken = self.queue.unplaceable(BROKEN)
            if not broken:
                raise
            for run, why in broken:
                self._put_aside(now, self.runs[run], f"it cannot be placed: {why}")
            return
        if admission is None:
            self._is_queue_dirty = False
            return
        run, hosts = admission
        try:
            self._emit(now, RunAdmitted(run=run, hosts=hosts))
        except BROKEN as error:
            self._withdraw(self.runs[run])
            self._put_aside(now, self.runs[run], f"it cannot be admitted: {error!r}")

    def _tell_hosts(self, now: float) -> bool:
        """Send each host what it lacks. False: runs had to be put aside, from which more follows."""
        for host in list(self._touched):
            state = self.hosts[host]
            if not state.is_behind:
                continue
            try:
                self._send_wants(now, state)
            except BROKEN:
                broken = unlaunchable(state, self.runs, self.runs_directory, BROKEN)
                if not broken:
                    raise
                for supervisor, why in broken:
                    self._put_aside(now, supervisor, why)
                return False
        self._touched.clear()
        return True

    def _decide_run(self, now: float, supervisor: Supervisor) -> None:
        try:
            facts = supervisor.decide(now)
            for fact in facts:
                self._emit(now, fact)
        except BROKEN as error:
            self._put_aside(now, supervisor, repr(error))
            return
        at = supervisor.deadline()
        if not facts and at is not None:
            heappush(self._deadlines, (at, supervisor.run))


def _failed(run: str, reason: str) -> RunEnded:
    return RunEnded(run=run, outcome="failed", exit_code=InvariantError.exit_code, reason=reason)


def _any(fact: Fact) -> AnyFact:
    return fact  # type: ignore[return-value]  # every concrete fact is in the union
