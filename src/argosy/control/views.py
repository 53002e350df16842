"""Views for people and programs: runs, processes, hosts and the queue as the HTTP API answers them.

Made from the deciders' state on request; docs/reference/control-interfaces.md lists the fields. Nothing here changes
anything.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.control.attempts import Attempt, Process, Role
from argosy.control.hostwants import HostWants
from argosy.control.placement import Capacity, need_of
from argosy.control.queue import Queue
from argosy.control.supervisor import Supervisor
from argosy.errors import NotFoundError


class ProcessView(msgspec.Struct, frozen=True, kw_only=True):
    """One process as it stands."""

    run: str
    role: str
    index: int
    rank: int | None
    host: str
    attempt: str
    number: int
    state: str
    waiting: str
    pid: int
    how: str
    started_at: float | None
    ready: bool
    restarts: int
    code: int | None
    signal: int | None
    ports: dict[str, int]
    stdout: str
    stderr: str
    tty: bool


class RoleView(msgspec.Struct, frozen=True, kw_only=True):
    """One role and its processes."""

    role: str
    gang: bool
    generation: int
    count: int
    processes: list[ProcessView]


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One run as it stands."""

    run: str
    name: str
    state: str
    outcome: str
    exit_code: int | None
    reason: str
    first_cause: str | None
    waiting: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    directory: str
    service: bool
    helps: str
    roles: list[RoleView]


def run_view(supervisor: Supervisor, queue: Queue, runs_directory: str) -> RunView:
    """The view of one run."""
    ended = supervisor.ended
    stop = supervisor.stop
    return RunView(
        run=supervisor.run,
        name=supervisor.submitted.name,
        state=run_state(supervisor),
        outcome=ended.outcome if ended else "",
        exit_code=ended.exit_code if ended else None,
        reason=ended.reason if ended else (stop.reason if stop else ""),
        first_cause=(ended.first_cause or None) if ended else None,
        waiting=_why_run_waits(supervisor, queue),
        submitted_at=supervisor.submitted_at,
        started_at=supervisor.started_at,
        ended_at=supervisor.ended_at,
        directory=f"{runs_directory}/{supervisor.run}",
        service=supervisor.spec.service,
        helps=supervisor.spec.helps,
        roles=[
            RoleView(
                role=role.name,
                gang=role.spec.gang,
                generation=role.generation,
                count=role.size,
                processes=[
                    process_view(supervisor, role, process, runs_directory)
                    for process in role.processes
                ],
            )
            for role in supervisor.roles.values()
        ],
    )


def run_state(supervisor: Supervisor) -> str:
    """queued, starting, running, stopping or ended."""
    if supervisor.ended is not None:
        return "ended"
    if supervisor.admitted is None:
        return "queued"
    if supervisor.stop is not None:
        return "stopping"
    return "running" if all(role.has_started for role in supervisor.order) else "starting"


def _why_run_waits(supervisor: Supervisor, queue: Queue) -> str:
    if supervisor.ended is not None:
        return ""
    if supervisor.admitted is None:
        return queue.waiting(supervisor.run)
    return next((f"{what} {why}" for what, why in supervisor.waits.items()), "")


def process_view(
    supervisor: Supervisor, role: Role, process: Process, runs_directory: str
) -> ProcessView:
    """The view of one process, by its newest attempt."""
    attempt = process.current
    state = process_state(supervisor, role, process)
    output = f"{runs_directory}/{supervisor.run}/logs/{role.name}.{process.index}"
    number = attempt.number if attempt is not None else 0
    exit = attempt.exit if attempt is not None else None
    prefix = f"{role.name}/{process.index}/"
    held = supervisor.ports.get(process.host, ("", {}))[1]
    tty = role.spec.tty
    waits = supervisor.waits
    return ProcessView(
        run=supervisor.run,
        role=role.name,
        index=process.index,
        rank=attempt.rank if attempt is not None and state != "removed" else None,
        host=process.host,
        attempt=attempt.id if attempt is not None else "",
        number=number,
        state=state,
        waiting=waits.get(f"{role.name}/{process.index}", waits.get(role.name, "")),
        pid=attempt.pid if attempt is not None and attempt.is_alive else 0,
        how=attempt.how if attempt is not None else "",
        started_at=attempt.started_at if attempt is not None else None,
        ready=attempt is not None and _is_ready(role, attempt),
        restarts=number,
        code=exit.code if exit is not None else None,
        signal=exit.signal if exit is not None else None,
        ports={key[len(prefix) :]: port for key, port in held.items() if key.startswith(prefix)},
        stdout=f"{output}.{number}.out",
        stderr=f"{output}.{number}.out" if tty else f"{output}.{number}.err",
        tty=tty,
    )


def _is_ready(role: Role, attempt: Attempt) -> bool:
    if not attempt.is_alive or attempt.started_at is None or attempt.parked:
        return False
    return attempt.said_ready or role.spec.ready is None


def process_state(supervisor: Supervisor, role: Role, process: Process) -> str:
    """waiting, planned, starting, parked, running, ready, stopping, exited, or removed from a gang that goes on."""
    attempt = process.current
    if attempt is None:
        return "waiting" if supervisor.ended is None else "exited"
    if not attempt.is_alive and process.index in role.dropped:
        return "removed"
    if not attempt.is_alive:
        waits = supervisor.waits
        is_waiting = f"{role.name}/{process.index}" in waits or role.name in waits
        return "waiting" if is_waiting and supervisor.stop is None else "exited"
    if attempt.stopping:
        return "stopping"
    if attempt.started_at is None:
        return "planned"
    if attempt.parked:
        return "parked"
    if role.spec.ready is not None:
        return "ready" if attempt.said_ready else "starting"
    return "ready" if attempt.said_ready else "running"


def processes_of(views: list[RunView]) -> list[ProcessView]:
    """All processes of some runs."""
    return [process for view in views for role in view.roles for process in role.processes]


def with_looks(view: RunView, halted: set[str], importing: dict[str, str]) -> RunView:
    """The same view with what the hosts see: attempts that a signal has stopped, and those whose warm parent is importing something."""
    replace = msgspec.structs.replace

    def show(process: ProcessView) -> ProcessView:
        if process.attempt in halted and process.pid:
            return replace(process, state="stopped")
        if process.attempt in importing and process.state == "planned":
            what = importing[process.attempt]
            why = f"to import {what}" if what else "to start"
            return replace(process, waiting=f"waits for a warm parent {why}")
        return process

    roles = [replace(role, processes=list(map(show, role.processes))) for role in view.roles]
    return replace(view, roles=roles)


def host_view(state: HostWants, capacity: Capacity) -> dict[str, Any]:
    """One host."""
    return {
        "host": state.host,
        "keeper": state.keeper,
        "pid": state.pid,
        "connected": state.connected,
        "seen_at": state.seen_at,
        "cpus": state.cpus,
        "memory_bytes": state.memory_bytes,
        "used_cpus": capacity.used_cpus,
        "used_memory_bytes": capacity.used_memory,
        "processes": capacity.processes,
    }


def queue_view(queue: Queue) -> list[dict[str, Any]]:
    """The waiting runs, best first."""
    return [
        {
            "run": entry.run,
            "name": entry.spec.name,
            "priority": entry.spec.priority,
            "share": entry.share,
            "cpus": need_of(entry.spec).cpus,
            "memory_bytes": need_of(entry.spec).memory,
            "ahead": position,
            "overtaken": entry.overtaken,
            "why": queue.waiting(entry.run),
        }
        for position, entry in enumerate(queue.in_order())
    ]


def find_run(runs: dict[str, Supervisor], name: str) -> Supervisor:
    """A run by id or, the newest, by name."""
    supervisor = runs.get(name)
    if supervisor is None:
        supervisor = next((s for s in reversed(runs.values()) if s.submitted.name == name), None)
    if supervisor is None:
        raise NotFoundError(f"there is no run {name}", fix="`argosy ps --all` lists the runs")
    return supervisor


def find(
    runs: dict[str, Supervisor], target: str, queue: Queue, runs_directory: str
) -> list[ProcessView]:
    """Processes of `RUN[/ROLE[/INDEX]]`."""
    parts = target.split("/")
    supervisor = find_run(runs, parts[0])
    if len(parts) > 3 or (len(parts) == 3 and not parts[2].isdigit()):
        raise NotFoundError(f"{target} is no target", fix="use RUN, RUN/ROLE or RUN/ROLE/INDEX")
    if len(parts) > 1 and parts[1] not in supervisor.roles:
        known = ", ".join(supervisor.roles)
        raise NotFoundError(
            f"run {supervisor.run} has no role {parts[1]}", fix=f"its roles: {known}"
        )
    found = [
        process_view(supervisor, role, process, runs_directory)
        for role in supervisor.roles.values()
        for process in role.processes
        if (len(parts) < 2 or role.name == parts[1])
        and (len(parts) < 3 or process.index == int(parts[2]))
    ]
    if not found:
        raise NotFoundError(f"there is no process {target}", fix=f"`argosy ps {supervisor.run}`")
    return found
