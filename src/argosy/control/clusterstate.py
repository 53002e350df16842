"""ClusterState: runs, hosts and the queue as folded from the facts of the log.

The coordinator decides on top of it and calls `_fold` for what it adds; `replay` is for the start, the views are for people. A run whose
facts cannot be folded is left out with its later facts, and the rest of the cluster is read on. Never decides and never reads a clock.
"""

from __future__ import annotations

from typing import Any

from argosy.control import views
from argosy.control.attempts import Role
from argosy.control.hostwants import HostWants
from argosy.control.identity import counter_of
from argosy.control.placement import Placement
from argosy.control.queue import Queue
from argosy.control.retention import Retention
from argosy.control.supervisor import Supervisor
from argosy.errors import InvariantError
from argosy.protocol.facts import (
    AttemptExited,
    AttemptPlanned,
    AttemptReleased,
    AttemptStopping,
    CommandAccepted,
    CommandDone,
    Event,
    FaultInjected,
    GangResized,
    GenerationFormed,
    HostJoined,
    HostLost,
    Note,
    RunAdmitted,
    RunEnded,
    RunsForgotten,
    RunSubmitted,
)

BROKEN = (InvariantError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What a bug of ours, or a fact from another version, raises in the fold or in a decision about one run."""


class ClusterState:
    """The state of one cluster."""

    def __init__(self, *, runs_directory: str, keep_ended: int, gaps_below: int) -> None:
        self.runs_directory = runs_directory
        self.seq = 0
        self.runs: dict[str, Supervisor] = {}
        self.hosts: dict[str, HostWants] = {}
        self.keepers: dict[str, str] = {}
        self.placement = Placement()
        self.queue = Queue(self.placement)
        self.retention = Retention(keep_ended)
        self.pending: dict[str, tuple[str, str, str]] = {}
        """Accepted commands without an outcome: id -> (verb, target, run)."""
        self.counts = {"queued": 0, "running": 0, "ended": 0}
        self.unreadable: dict[str, str] = {}
        """Runs whose facts could not be folded in the replay, and why."""
        self._gaps_below = gaps_below
        self._cursors: dict[str, int] = {}
        self._dirty: dict[str, None] = {}
        self._touched: dict[str, None] = {}
        """Hosts whose wants may have changed."""
        self._is_queue_dirty = True
        self._has_resumed = True

    def replay(self, event: Event) -> None:
        """Fold an event of the log; decisions wait for the first input after it."""
        self._has_resumed = False
        fact: Any = event.fact
        run = getattr(fact, "run", "") or getattr(fact, "about", "")
        if run in self.unreadable:
            self._take_place(event)
            self._skip(event)
            return
        was_at = self.seq
        try:
            self._fold(event)
        except BROKEN as error:
            if not run or self.seq == was_at:
                raise  # not about one run, or a hole in the log
            self.unreadable[run] = f"event {event.seq}: {error!r}"
            # Its submission may be what cannot be read; its id is taken all the same.
            retention = self.retention
            retention.num_submitted = max(retention.num_submitted, counter_of(run) or 0)
            self._skip(event)

    def _skip(self, event: Event) -> None:
        """Of a run that could not be read only the end counts, and what became of its commands."""
        fact: Any = event.fact
        supervisor = self.runs.get(getattr(fact, "run", "") or getattr(fact, "about", ""))
        if isinstance(fact, CommandDone):
            self.pending.pop(fact.command, None)
            if supervisor is not None:
                supervisor.commands.pop(fact.command, None)
        elif isinstance(fact, CommandAccepted) and supervisor is not None:
            self.pending[fact.command] = (fact.verb, fact.target, fact.about)
            supervisor.commands[fact.command] = (fact.verb, fact.target)
        elif isinstance(fact, RunEnded) and supervisor is not None:
            for attempt in supervisor.close(event, fact):
                self._effect_attempt(event, supervisor, attempt)
            self._effect_ended(event, supervisor, fact)
        elif isinstance(fact, RunEnded):
            # Not even its submission can be read: it is known only as one that has ended.
            self.counts["ended"] += 1
            self.retention.end(fact.run, 0)

    def _take_place(self, event: Event) -> None:
        if event.seq != self.seq + 1 and not self.seq < event.seq <= self._gaps_below:
            raise InvariantError(f"event {event.seq} follows {self.seq}")
        self.seq = event.seq
        if event.source is not None:
            source, number = event.source
            self._cursors[source] = max(self._cursors.get(source, 0), number)

    def _fold(self, event: Event) -> None:
        self._take_place(event)
        fact = event.fact
        if isinstance(fact, HostJoined | HostLost):
            self._fold_host(event, fact)
        elif isinstance(fact, RunSubmitted):
            retention = self.retention
            # Numbers of runs whose submission cannot be read are taken, too.
            number = counter_of(fact.run) or 0
            retention.num_submitted = max(retention.num_submitted + 1, number)
            self.runs[fact.run] = Supervisor(event, self.keepers)
            self.queue.add(fact.run, fact.spec, event.seq)
            self.counts["queued"] += 1
            self._is_queue_dirty = True
        elif isinstance(fact, CommandAccepted | CommandDone):
            self._fold_command(event, fact)
        elif isinstance(fact, RunsForgotten):
            self._fold_forgotten(fact)
        else:
            self._fold_run(event, fact)

    def _fold_host(self, event: Event, fact: HostJoined | HostLost) -> None:
        if isinstance(fact, HostLost):
            return
        state = self.hosts.setdefault(fact.host, HostWants(fact.host))
        self._touched[fact.host] = None
        if state.keeper and state.keeper != fact.keeper:
            state.past_keepers.add(state.keeper)
        state.keeper, state.pid = fact.keeper, fact.pid
        state.cpus, state.memory_bytes = fact.cpus, fact.memory_bytes
        self.keepers[fact.host] = fact.keeper
        self.placement.set_host(fact.host, fact.cpus, fact.memory_bytes)
        self._is_queue_dirty = True
        for run in state.runs():
            supervisor = self.runs.get(run)
            if supervisor is not None and supervisor.ended is None:
                state.touch_run(run, event.seq)  # its ports are to be held by the new keeper
                self._dirty[run] = None

    def _fold_command(self, event: Event, fact: CommandAccepted | CommandDone) -> None:
        if isinstance(fact, CommandAccepted):
            self.pending[fact.command] = (fact.verb, fact.target, fact.about)
            verb, target = fact.verb, fact.target
        else:
            verb, target, _run = self.pending.pop(fact.command, ("", "", ""))
        supervisor = self.runs.get(target.partition("/")[0])
        if supervisor is not None and supervisor.run in self.unreadable:
            self._skip(event)
        elif verb in ("stop", "kill", "scale") and supervisor is not None:
            supervisor.apply(event)
            self._dirty[supervisor.run] = None

    def _fold_forgotten(self, fact: RunsForgotten) -> None:
        """Drop the runs. The rest is known already, unless their events are gone from the log that is replayed."""
        self.retention.forget(fact.runs)
        self.retention.num_submitted = fact.num_submitted
        for run in fact.runs:
            self.runs.pop(run, None)
            self.unreadable.pop(run, None)
            self._dirty.pop(run, None)
        self.counts["ended"] = fact.num_ended
        for source, number in fact.cursors.items():
            self._cursors[source] = max(self._cursors.get(source, 0), number)
        if not self._has_resumed:
            self.queue.remember(fact.num_admitted, fact.turns, fact.overtaken)

    def memory(self, forgotten: list[str] | None = None) -> RunsForgotten:
        """The fact that these runs are forgotten: all that their events have led to beside them."""
        num_admitted, turns, overtaken = self.queue.memory()
        return RunsForgotten(
            runs=forgotten or [],
            cursors=dict(self._cursors),
            num_submitted=self.retention.num_submitted,
            num_ended=self.counts["ended"],
            num_admitted=num_admitted,
            turns=turns,
            overtaken=overtaken,
        )

    def _fold_run(self, event: Event, fact: Any) -> None:
        supervisor = self.runs.get(fact.run)
        if supervisor is None:
            if isinstance(fact, Note):
                return
            if not isinstance(fact, RunEnded) or fact.run not in self.unreadable:
                raise InvariantError(f"{type(fact).__name__} of the unknown run {fact.run}")
        if fact.run in self.unreadable:
            self._skip(event)
            return
        assert supervisor is not None
        supervisor.apply(event)
        if isinstance(fact, Note):
            return
        self._dirty[supervisor.run] = None
        effect = _EFFECTS.get(type(fact))
        if effect is not None:
            effect(self, event, supervisor, fact)

    def _withdraw(self, supervisor: Supervisor) -> None:
        """Take back what an admission that could not be folded has left: for the log it waits."""
        if supervisor.run in self.queue.entries:
            supervisor.admitted = supervisor.started_at = None
            for role in supervisor.order:
                for process in role.processes:
                    process.host = ""

    def _effect_attempt(self, event: Event, supervisor: Supervisor, fact: Any) -> None:
        attempt = supervisor.attempts[fact.attempt]
        self.hosts[attempt.host].touch_attempt(attempt.id, event.seq)
        self._touched[attempt.host] = None
        if not attempt.is_alive:
            # Without a process it is in no hello, and who waits for it in a generation that it was not told hears of its end only from its host.
            role = supervisor.roles[attempt.role]
            is_awaited = attempt.reform and attempt.generation == role.generation
            self._finish(self.hosts[attempt.host], attempt.id, is_awaited)

    def _effect_formed(self, event: Event, supervisor: Supervisor, fact: GenerationFormed) -> None:
        self._drop_ended(supervisor.roles[fact.role])
        for attempt in supervisor.roles[fact.role].alive():
            if not attempt.parked:
                self.hosts[attempt.host].touch_attempt(attempt.id, event.seq)
                self._touched[attempt.host] = None

    def _effect_resized(self, event: Event, supervisor: Supervisor, fact: GangResized) -> None:
        self.placement.take(supervisor.spec, {fact.role: fact.hosts})

    def _effect_fault(self, event: Event, supervisor: Supervisor, fact: FaultInjected) -> None:
        if fact.is_told:
            self._effect_attempt(event, supervisor, fact)
        if fact.part == "keeper":
            for state in self.hosts.values():
                state.condemned = {state.keeper: fact.number}

    def _effect_admitted(self, event: Event, supervisor: Supervisor, fact: RunAdmitted) -> None:
        self.queue.admit(fact.run, fact.hosts)
        self.counts["queued"] -= 1
        self.counts["running"] += 1
        for host in supervisor.hosts():
            if supervisor.wanted_ports(host):
                self.hosts[host].touch_run(fact.run, event.seq)
                self._touched[host] = None

    def _effect_ended(self, event: Event, supervisor: Supervisor, fact: RunEnded) -> None:
        self.counts["ended"] += 1
        self.retention.end(fact.run, len(supervisor.attempts))
        self._is_queue_dirty = True
        if supervisor.admitted is None:
            self.queue.remove(fact.run)
            self.counts["queued"] -= 1
            return
        self.counts["running"] -= 1
        self.queue.release(fact.run, supervisor.spec, supervisor.admitted.hosts)
        for role in supervisor.order:
            self._drop_ended(role)
        for host in supervisor.hosts():
            self.hosts[host].touch_run(fact.run, event.seq)
            self._finish(self.hosts[host], fact.run)
            self._touched[host] = None

    def _finish(self, state: HostWants, name: str, is_awaited: bool = False) -> None:
        """The host is told once that it may forget; one that missed it says so in its next hello, unless others wait for that word."""
        if self._has_resumed or is_awaited:
            state.finish(name, self.seq)
        else:
            state.drop(name)

    def _drop_ended(self, role: Role) -> None:
        """In a replay: nobody waits any more for those that had ended before a newer generation, or before the end of the run."""
        for process in role.processes if not self._has_resumed else ():
            if process.current is not None and not process.current.is_alive:
                self.hosts[process.current.host].drop(process.current.id)

    # --- views --------------------------------------------------------------------------------------------------

    def _find_run(self, run: str) -> Supervisor:
        supervisor = self.runs.get(run)
        if supervisor is None:
            raise self.retention.missing(run, self.runs_directory)
        self.retention.ask(run)
        return supervisor

    def run_view(self, run: str) -> views.RunView:
        """One run for people."""
        return views.run_view(self._find_run(run), self.queue, self.runs_directory)

    def runs_view(
        self, *, include_ended: bool = False, limit: int = 100, name: str = ""
    ) -> list[views.RunView]:
        """The newest runs first."""
        chosen: list[views.RunView] = []
        for supervisor in reversed(self.runs.values()):
            if len(chosen) >= limit:
                break
            if name and supervisor.submitted.name != name:
                continue
            if include_ended or supervisor.ended is None:
                chosen.append(views.run_view(supervisor, self.queue, self.runs_directory))
        return chosen

    def hosts_view(self) -> list[dict[str, Any]]:
        """All hosts for people."""
        return [
            views.host_view(state, self.placement.hosts[state.host])
            for state in self.hosts.values()
        ]

    def queue_view(self) -> list[dict[str, Any]]:
        """The waiting runs, best first."""
        return views.queue_view(self.queue)

    def find(self, target: str) -> list[views.ProcessView]:
        """Processes of `RUN[/ROLE[/INDEX]]`; RUN is an id or a name (the newest of it)."""
        return views.find(self.runs, target, self.queue, self.runs_directory)


_EFFECTS: dict[type, Any] = {
    AttemptPlanned: ClusterState._effect_attempt,
    AttemptReleased: ClusterState._effect_attempt,
    AttemptStopping: ClusterState._effect_attempt,
    AttemptExited: ClusterState._effect_attempt,
    GenerationFormed: ClusterState._effect_formed,
    GangResized: ClusterState._effect_resized,
    FaultInjected: ClusterState._effect_fault,
    RunAdmitted: ClusterState._effect_admitted,
    RunEnded: ClusterState._effect_ended,
}
