"""RunState: one run as folded from its facts, and the questions one may ask of it.

The supervisor decides on top of it, launching.py and views.py read it. Only `apply` changes it; an impossible fact raises
with the story of the run. Never decides and never reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from argosy.config.checks import start_order
from argosy.control import membership
from argosy.control.attempts import Attempt, Process, Role
from argosy.control.faults import left_over
from argosy.control.restarts import in_force
from argosy.errors import InvariantError
from argosy.protocol.facts import (
    AttemptEntered,
    AttemptExited,
    AttemptJoined,
    AttemptPlanned,
    AttemptProgressed,
    AttemptReady,
    AttemptReleased,
    AttemptSaving,
    AttemptStarted,
    AttemptStopping,
    AttemptSuspected,
    CommandAccepted,
    CommandDone,
    Event,
    EvidenceKept,
    FaultInjected,
    FaultMet,
    GangBounded,
    GangResized,
    GenerationFormed,
    Note,
    PortsRefused,
    PortsReserved,
    RunAdmitted,
    RunEnded,
    RunSubmitted,
    StateSaved,
    StopRequested,
)

STORY_LENGTH = 40


class RunState:
    """The state of one run."""

    def __init__(self, event: Event, keepers: Mapping[str, str]) -> None:
        assert isinstance(event.fact, RunSubmitted)
        self.submitted = event.fact
        self.run = event.fact.run
        self.spec = event.fact.spec
        self.submitted_seq = event.seq
        self.submitted_at = event.at
        self.keepers = keepers
        self.roles = {
            name: Role.of(name, in_force(self.spec, role)) for name, role in self.spec.roles.items()
        }
        self.order = [self.roles[name] for name in start_order(self.spec)]
        self.attempts: dict[str, Attempt] = {}
        self.has_any_ports = any(role.ports for role in self.spec.roles.values())
        self.admitted: RunAdmitted | None = None
        self.ports: dict[str, tuple[str, dict[str, int]]] = {}
        self.ports_refused: PortsRefused | None = None
        self.stop: StopRequested | None = None
        self.stop_seq = 0
        self.ended: RunEnded | None = None
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.commands: dict[str, tuple[str, str]] = {}
        """Accepted and not yet done: id -> (verb, target)."""
        self._story: deque[Event] = deque([event], maxlen=STORY_LENGTH)

    # --- fold ---------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Fold one fact; an impossible one raises InvariantError with the story of the run."""
        self._story.append(event)
        fold = _FOLDS.get(type(event.fact))
        if fold is None:
            raise self._impossible(f"{type(event.fact).__name__} does not belong to a run")
        if self.ended is not None and not isinstance(
            event.fact, CommandAccepted | CommandDone | Note
        ):
            raise self._impossible(f"run {self.run} has ended")
        fold(self, event, event.fact)

    def _impossible(self, what: str) -> InvariantError:
        return InvariantError(what, story=[f"{e.seq} {e.at:.3f} {e.fact}" for e in self._story])

    def _attempt(self, name: str) -> Attempt:
        attempt = self.attempts.get(name)
        if attempt is None:
            raise self._impossible(f"attempt {name} was never planned")
        return attempt

    def _living(self, name: str) -> Attempt:
        attempt = self._attempt(name)
        if attempt.exit is not None:
            raise self._impossible(f"attempt {name} has exited already")
        return attempt

    def _fold_admitted(self, event: Event, fact: RunAdmitted) -> None:
        if self.admitted is not None:
            raise self._impossible(f"run {self.run} was admitted twice")
        for name, hosts in fact.hosts.items():
            for process, host in zip(self.roles[name].processes, hosts, strict=True):
                process.host = host
        self.admitted = fact
        self.started_at = event.at

    def _fold_ports(self, event: Event, fact: PortsReserved) -> None:
        self.ports[fact.host] = (self.keepers[fact.host], fact.ports)

    def _fold_refused(self, event: Event, fact: PortsRefused) -> None:
        self.ports_refused = fact

    def _fold_formed(self, event: Event, fact: GenerationFormed) -> None:
        role = self.roles[fact.role]
        problem = membership.why_impossible(role, fact)
        if problem:
            raise self._impossible(problem)
        membership.fold_generation(role, fact, event.at)

    def _fold_resized(self, event: Event, fact: GangResized) -> None:
        role = self.roles[fact.role]
        if self.admitted is None or not role.generation:
            raise self._impossible(f"{fact.role} was resized before it was started")
        for host in fact.hosts:
            role.processes.append(Process(len(role.processes), host))
        places = {**self.admitted.hosts}
        places[fact.role] = [*places[fact.role], *fact.hosts]
        self.admitted = RunAdmitted(run=self.run, hosts=places)
        role.size = role.asked_size = fact.size
        role.resized_by = fact.command
        role.is_resizing = fact.size != len(role.members)

    def _fold_bounded(self, event: Event, fact: GangBounded) -> None:
        role = self.roles[fact.role]
        role.bounds = fact
        if role.is_resizing and role.size > fact.most:
            # Asked for before anybody knew: as many as there can be.
            role.size = role.asked_size = fact.most
            role.is_resizing = role.size != len(role.members)

    def _fold_saved(self, event: Event, fact: StateSaved) -> None:
        role = self.roles[self._attempt(fact.attempt).role]
        role.saved, role.has_saved = fact, self.stop is not None

    def _fold_planned(self, event: Event, fact: AttemptPlanned) -> None:
        process = self.roles[fact.role].processes[fact.index]
        if process.alive is not None:
            raise self._impossible(f"{fact.attempt} planned while {process.alive.id} is not reaped")
        if fact.attempt in self.attempts:
            raise self._impossible(f"{fact.attempt} was planned twice")
        attempt = Attempt(
            id=fact.attempt,
            role=fact.role,
            index=fact.index,
            number=fact.number,
            host=fact.host,
            keeper=self.keepers.get(fact.host, ""),
            planned_seq=event.seq,
            planned_at=event.at,
            generation=fact.generation,
            since=fact.generation,
            rank=fact.rank,
            parked=fact.parked,
            saving=fact.saving,
        )
        self.attempts[fact.attempt] = process.current = attempt

    def _fold_released(self, event: Event, fact: AttemptReleased) -> None:
        attempt = self._living(fact.attempt)
        if not attempt.parked:
            raise self._impossible(f"{fact.attempt} is not parked")
        attempt.parked, attempt.released_at = False, event.at
        attempt.generation, attempt.rank = fact.generation, fact.rank
        attempt.since = fact.generation

    def _fold_started(self, event: Event, fact: AttemptStarted) -> None:
        attempt = self._living(fact.attempt)
        if attempt.started_at is not None:
            raise self._impossible(f"{fact.attempt} started twice")
        attempt.pid, attempt.how, attempt.note = fact.pid, fact.how, fact.note
        attempt.started_at = event.at
        role = self.roles[attempt.role]
        if not role.has_started:
            role.has_started = role.is_so_of_all(_was_started)

    def _fold_ready(self, event: Event, fact: AttemptReady) -> None:
        attempt = self._living(fact.attempt)
        attempt.said_ready = True
        role = self.roles[attempt.role]
        role.is_observable = True
        role.note_progress(attempt)

    def _fold_joined(self, event: Event, fact: AttemptJoined) -> None:
        attempt = self._living(fact.attempt)
        if attempt.joined is None:
            attempt.joined_at = event.at
        attempt.joined = fact.generation
        role = self.roles[attempt.role]
        if not role.can_join:
            role.can_join = role.is_so_of_all(_has_joined)

    def _fold_entered(self, event: Event, fact: AttemptEntered) -> None:
        attempt = self._living(fact.attempt)
        role = self.roles[attempt.role]
        attempt.entered_at = event.at
        role.entered_at = event.at if role.entered_at is None else role.entered_at
        began = max(attempt.started_at or event.at, attempt.released_at)
        role.slowest_entry = max(role.slowest_entry, event.at - began)

    def _fold_progressed(self, event: Event, fact: AttemptProgressed) -> None:
        attempt = self._living(fact.attempt)
        attempt.step = fact.step
        role = self.roles[attempt.role]
        role.is_observable = role.has_trained = True
        role.note_progress(attempt)

    def _fold_advance(self, event: Event, fact: AttemptSaving) -> None:
        attempt = self._living(fact.attempt)
        attempt.advance, attempt.advanced_at = fact, event.at

    def _fold_suspected(self, event: Event, fact: AttemptSuspected) -> None:
        attempt = self._living(fact.attempt)
        if attempt.suspected_at is not None:
            raise self._impossible(f"{fact.attempt} was suspected twice")
        attempt.suspected_at, attempt.suspicion = event.at, fact.reason

    def _fold_evidence(self, event: Event, fact: EvidenceKept) -> None:
        self._attempt(fact.attempt).has_evidence = True

    def _fold_fault(self, event: Event, fact: FaultInjected) -> None:
        if not fact.is_told:
            return
        self._living(fact.attempt).faults.append(fact)
        for rank, waiting in list(self.roles[fact.role].orphans.items()):
            left = [each for each in waiting if each.number != fact.number]
            self.roles[fact.role].orphans[rank] = left
            if not left:
                del self.roles[fact.role].orphans[rank]

    def _fold_met(self, event: Event, fact: FaultMet) -> None:
        self._living(fact.attempt)

    def _fold_stopping(self, event: Event, fact: AttemptStopping) -> None:
        attempt = self._living(fact.attempt)
        if attempt.stopping == "kill" or attempt.stopping == fact.level:
            raise self._impossible(f"{fact.attempt} was told to end twice")
        if not attempt.stopping:
            attempt.stopping_at = event.at
        attempt.stopping, attempt.stop_reason = fact.level, fact.reason
        attempt.stop_failure = fact.failure or attempt.stop_failure

    def _fold_exited(self, event: Event, fact: AttemptExited) -> None:
        attempt = self._living(fact.attempt)
        attempt.conclude(fact, event.seq, event.at)
        role = self.roles[attempt.role]
        process = role.processes[attempt.index]
        left = left_over(attempt.faults)
        if left and attempt.rank is not None:
            role.orphans[attempt.rank] = role.orphans.get(attempt.rank, []) + left
        is_member = role.spec.gang and not attempt.parked
        if is_member or attempt.failure is None:
            return  # a gang's failures are counted once for each generation, when the next is formed
        life = attempt.life(role.spec.backoff.most_seconds)
        process.history.add(role.spec.budget, event.at, attempt.failure, life)
        role.history.add(role.spec.budget, event.at, attempt.failure, life)

    def _fold_stop(self, event: Event, fact: StopRequested) -> None:
        was = self.stop
        if was is None:
            self.stop_seq = event.seq
        if was is None or fact.hard > was.hard:
            # The first reason is the reason; later ones only make it harder.
            self.stop = fact if was is None else msgspec.structs.replace(was, hard=fact.hard)

    def _fold_ended(self, event: Event, fact: RunEnded) -> None:
        if any(role.alive() for role in self.order):
            raise self._impossible(f"run {self.run} ended with a process that is not reaped")
        self.ended, self.ended_at = fact, event.at
        # Thousands of ended runs stay in memory: their stories are in the log.
        self._story = deque(list(self._story)[-3:], maxlen=STORY_LENGTH)

    def close(self, event: Event, fact: RunEnded) -> list[AttemptExited]:
        """Take the end as it is, whatever of the run could not be folded; the exits that this assumes."""
        exits = []
        for role in self.order:
            for attempt in role.alive():
                exit = AttemptExited(attempt=attempt.id, run=self.run, lost=True, at=event.at)
                attempt.conclude(exit, event.seq, event.at)
                exits.append(exit)
        self.ended, self.ended_at = fact, event.at
        return exits

    def _fold_accepted(self, event: Event, fact: CommandAccepted) -> None:
        self.commands[fact.command] = (fact.verb, fact.target)
        if fact.verb not in ("stop", "kill"):
            return
        for process in self.targets(fact.target):
            process.retired = "kill" if fact.verb == "kill" else process.retired or "term"

    def _fold_done(self, event: Event, fact: CommandDone) -> None:
        self.commands.pop(fact.command, None)

    def _fold_note(self, event: Event, fact: Note) -> None:
        pass

    def targets(self, target: str) -> list[Process]:
        """Processes of a target `run/role[/index]`; none for the whole run."""
        parts = target.split("/")
        if len(parts) < 2:
            return []
        processes = self.roles[parts[1]].processes
        return processes if len(parts) == 2 else [processes[int(parts[2])]]

    # --- what hosts are asked for -------------------------------------------------------------------------------

    def hosts(self) -> list[str]:
        """Every host that has or had a part of the run, each once, in order."""
        if self.admitted is None:
            return []
        return list(dict.fromkeys(host for hosts in self.admitted.hosts.values() for host in hosts))

    def wanted_ports(self, host: str) -> dict[str, int]:
        """`role/index/name` -> number to hold on the host; 0: any. Given ones are asked for again."""
        wanted: dict[str, int] = {}
        if not self.has_any_ports:
            return wanted
        given = self.ports.get(host, ("", {}))[1]
        for role in self.order:
            for process in role.processes:
                if process.host == host:
                    for name, number in role.spec.ports.items():
                        key = f"{role.name}/{process.index}/{name}"
                        wanted[key] = given.get(key, number)
        return wanted

    def has_ports(self, host: str) -> bool:
        """The host's present keeper holds them."""
        return host in self.ports and self.ports[host][0] == self.keepers.get(host)


def _has_joined(process: Process) -> bool:
    return process.current is not None and process.current.joined is not None


def _was_started(process: Process) -> bool:
    return process.current is not None and (
        process.current.started_at is not None or process.current.number > 0
    )


_FOLDS: dict[type, Callable[[RunState, Event, Any], None]] = {
    RunAdmitted: RunState._fold_admitted,
    PortsReserved: RunState._fold_ports,
    PortsRefused: RunState._fold_refused,
    GenerationFormed: RunState._fold_formed,
    GangResized: RunState._fold_resized,
    GangBounded: RunState._fold_bounded,
    StateSaved: RunState._fold_saved,
    AttemptPlanned: RunState._fold_planned,
    AttemptReleased: RunState._fold_released,
    AttemptStarted: RunState._fold_started,
    AttemptReady: RunState._fold_ready,
    AttemptJoined: RunState._fold_joined,
    AttemptEntered: RunState._fold_entered,
    AttemptProgressed: RunState._fold_progressed,
    AttemptSaving: RunState._fold_advance,
    AttemptSuspected: RunState._fold_suspected,
    EvidenceKept: RunState._fold_evidence,
    FaultInjected: RunState._fold_fault,
    FaultMet: RunState._fold_met,
    AttemptStopping: RunState._fold_stopping,
    AttemptExited: RunState._fold_exited,
    StopRequested: RunState._fold_stop,
    RunEnded: RunState._fold_ended,
    CommandAccepted: RunState._fold_accepted,
    CommandDone: RunState._fold_done,
    Note: RunState._fold_note,
}
