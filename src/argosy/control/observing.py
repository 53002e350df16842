"""From what a host observed to facts: only what is new and possible becomes one.

A host may repeat itself, and two of its sources are not ordered among each other; whatever the run's state already
says, or no longer allows, is left out here so that the supervisors fold only true transitions. Pure.
"""

from __future__ import annotations

from typing import Any

from argosy.control.attempts import Attempt
from argosy.control.hostwants import HostWants
from argosy.control.identity import run_of
from argosy.control.restarts import NOT_READY
from argosy.control.supervisor import Supervisor
from argosy.protocol.facts import (
    AttemptEntered,
    AttemptExited,
    AttemptJoined,
    AttemptProgressed,
    AttemptReady,
    AttemptSaving,
    AttemptStarted,
    AttemptStopping,
    AttemptSuspected,
    Fact,
    FailureClass,
    FaultMet,
    GangBounded,
    Note,
    PortsRefused,
    PortsReserved,
    StateSaved,
    StopRequested,
)
from argosy.protocol.messages import Hello, Observed

MOST_ERROR_CHARACTERS = 16 << 10


def facts_of(
    supervisor: Supervisor, host: str, source: str, observed: Observed, now: float
) -> list[Fact]:
    """The facts that one observation adds; usually one, none if it is not news."""
    if observed.kind in ("ports", "ports_refused"):
        return _ports(supervisor, host, source, observed)
    if observed.kind == "note":
        return [note_of(observed)]
    attempt = supervisor.attempts.get(observed.attempt)
    if attempt is None or (supervisor.ended is not None and not attempt.is_alive):
        return _unwanted(supervisor, observed) if observed.kind == "started" else []
    if "@" not in source and source != attempt.keeper:
        return []
    if observed.kind in ("bounded", "saved"):
        return _of_trainer(supervisor, attempt, observed)
    if not attempt.is_alive:
        return _unwanted(supervisor, observed) if observed.kind == "started" else []
    if observed.kind == "suspected":
        return _suspected(supervisor, attempt, observed.data)
    if observed.kind == "gave_up":
        return _gave_up(supervisor, attempt, observed.data)
    return _of_living(supervisor.run, attempt, observed, now)


def _of_living(run: str, attempt: Attempt, observed: Observed, now: float) -> list[Fact]:
    data = observed.data
    name = attempt.id
    match observed.kind:
        case "started" if attempt.started_at is None:
            how = "fork" if data.get("how") == "fork" else "exec"
            note = str(data.get("note") or "")
            pid = int(data.get("pid") or 0)
            return [AttemptStarted(attempt=name, run=run, pid=pid, how=how, note=note)]  # type: ignore[arg-type]
        case "ready" if not attempt.said_ready:
            return [AttemptReady(attempt=name, run=run)]
        case "joined" if attempt.joined != data.get("generation"):
            return [AttemptJoined(attempt=name, run=run, generation=int(data["generation"]))]
        case "entered" if attempt.entered_at is None:
            return [AttemptEntered(attempt=name, run=run)]
        case "progressed" if attempt.step is None:
            return [AttemptProgressed(attempt=name, run=run, step=int(data.get("step") or 0))]
        case "saving":
            return [AttemptSaving(attempt=name, run=run, **data)]
        case "met" if any(fault.number == data["number"] for fault in attempt.faults):
            return [FaultMet(attempt=name, run=run, number=data["number"])]
        case "hung" | "unready" if not attempt.stopping:
            # What was asked to end anyway does not fail by being slow about it.
            reason = str(data.get("reason") or observed.kind)
            failure: FailureClass = "hang" if observed.kind == "hung" else "user"
            return [
                AttemptStopping(attempt=name, run=run, level="kill", reason=reason, failure=failure)
            ]
        case "exited":
            return [_exited(run, attempt, data, now)]
    return []


def _of_trainer(supervisor: Supervisor, attempt: Attempt, observed: Observed) -> list[Fact]:
    """What a trainer says of the whole run: every member says it, and it is news once."""
    data, run = observed.data, supervisor.run
    fact: GangBounded | StateSaved
    if observed.kind == "bounded":
        fact = GangBounded(run=run, role=attempt.role, **data)
        return [] if fact == supervisor.roles[attempt.role].bounds else [fact]
    fact = StateSaved(run=run, attempt=attempt.id, **data)
    role = supervisor.roles[attempt.role]
    known = role.saved
    is_known = known is not None and (known.step, known.path) == (fact.step, fact.path)
    return [] if is_known and role.has_saved else [fact]


def _suspected(supervisor: Supervisor, by: Attempt, data: dict[str, Any]) -> list[Fact]:
    """A member accuses another one, and each is suspected once.

    By its process id when that is told: members may still work in a generation that is past here. Else by a rank of the present generation.
    """
    role = supervisor.roles[by.role]
    rank, generation = int(data["rank"]), int(data["generation"])
    if supervisor.stop is not None:
        return []
    if "pid" in data:
        suspect = next((a for a in role.alive() if a.pid == data["pid"]), None)
    elif generation == role.generation and rank < len(role.members):
        suspect = role.processes[role.members[rank]].alive
        if suspect is not None and suspect.generation != generation:
            return []
    else:
        return []
    if suspect is None or suspect is by:
        return []
    if suspect.stopping or suspect.suspected_at is not None or suspect.started_at is None:
        return []
    reason = str(data.get("reason") or "a peer says that it hangs")
    return [
        AttemptSuspected(
            attempt=suspect.id,
            run=supervisor.run,
            by=by.id,
            generation=generation,
            reason=reason,
        )
    ]


def _gave_up(supervisor: Supervisor, by: Attempt, data: dict[str, Any]) -> list[Fact]:
    """A program knows that its run cannot succeed: it ends as failed, without another start."""
    if supervisor.stop is not None:
        return []
    reason = str(data.get("reason") or "its program gave up")
    who = f"rank {by.rank}" if by.rank is not None else f"{by.role}/{by.index}"
    blamed = _blamed(supervisor, by, data["rank"]) if "rank" in data else None
    return [
        StopRequested(
            run=supervisor.run,
            hard=False,
            reason=f"{who}: {reason}",
            failed=True,
            cause=(blamed or by).id,
            declared=blamed is None,
            code=data.get("code"),
        )
    ]


def _blamed(supervisor: Supervisor, by: Attempt, rank: int) -> Attempt | None:
    """Whose end a member gives as the reason: the newest attempt with this rank that has ended, or is about to."""
    found = [
        each
        for each in supervisor.attempts.values()
        if each.role == by.role and each.rank == rank and each is not by
    ]
    return max(found, key=lambda each: (each.exit is not None, each.planned_seq), default=None)


def _exited(run: str, attempt: Attempt, data: dict[str, Any], now: float) -> AttemptExited:
    error = str(data.get("error") or "")
    if attempt.stop_failure == "user" and not error:
        error = f"{NOT_READY}: {attempt.stop_reason}"
    return AttemptExited(
        attempt=attempt.id,
        run=run,
        code=data.get("code"),
        signal=data.get("signal"),
        is_oom=bool(data.get("is_oom")),
        hung=attempt.stop_failure == "hang",
        error=error[-MOST_ERROR_CHARACTERS:],
        swept=int(data.get("swept") or 0),
        at=float(data.get("at") or now),
    )


def _unwanted(supervisor: Supervisor, observed: Observed) -> list[Fact]:
    text = f"{observed.attempt} turned up after its end; it is ended again"
    return [Note(run=supervisor.run, attempt=observed.attempt, level="error", text=text)]


def _ports(supervisor: Supervisor, host: str, source: str, observed: Observed) -> list[Fact]:
    if supervisor.admitted is None or supervisor.ended is not None or supervisor.has_ports(host):
        return []
    if observed.data.get("keeper", supervisor.keepers.get(host)) != supervisor.keepers.get(host):
        return []  # held by a keeper that is gone
    if observed.kind == "ports_refused":
        if supervisor.ports_refused is not None:
            return []
        reason = str(observed.data.get("reason") or "a port could not be had")
        return [PortsRefused(run=supervisor.run, host=host, reason=reason)]
    ports = {str(key): int(port) for key, port in observed.data.get("ports", {}).items()}
    if set(ports) != set(supervisor.wanted_ports(host)):
        return []
    return [PortsReserved(run=supervisor.run, host=host, ports=ports)]


def lost_with_old_keeper(
    runs: dict[str, Supervisor], state: HostWants, now: float
) -> list[AttemptExited]:
    """What an earlier keeper of the host had is gone."""
    lost = []
    for name in state.attempts():
        supervisor = runs.get(run_of(name))
        attempt = supervisor.attempts.get(name) if supervisor is not None else None
        if supervisor is None or attempt is None:
            continue  # forgotten; the host has not confirmed yet that it is gone
        if attempt.is_alive and attempt.keeper != state.keeper:
            error = f"its keeper {attempt.keeper} is gone"
            fault = state.condemned.get(attempt.keeper, 0)
            exit = AttemptExited(
                attempt=name, run=supervisor.run, lost=True, error=error, at=now, fault=fault
            )
            lost.append(exit)
    return lost


def leftovers(runs: dict[str, Supervisor], hello: Hello) -> tuple[list[str], list[str]]:
    """Attempts and runs that the host still holds and nobody wants any more."""
    attempts = []
    for name in hello.alive:
        supervisor = runs.get(run_of(name))
        attempt = supervisor.attempts.get(name) if supervisor is not None else None
        if attempt is None or not attempt.is_alive:
            attempts.append(name)
    over = [run for run in hello.runs if run not in runs or runs[run].ended is not None]
    return attempts, over


def note_of(observed: Observed) -> Note:
    """A host's note."""
    level = observed.data.get("level")
    return Note(
        run=observed.run,
        attempt=observed.attempt,
        level=level if level in ("info", "warning", "error") else "info",
        text=str(observed.data.get("text") or ""),
    )
