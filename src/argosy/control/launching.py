"""Launches: all that a host needs to start one attempt, as a function of the run's state.

Paths follow docs/reference/home.md, gang variables are those that torchrun sets. MASTER_ADDR and MASTER_PORT are the
keeper's, which holds the store. Called by the coordinator when it tells a host what it wants; never reads a file.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.config.ports import port_variable
from argosy.config.spec import RoleSpec
from argosy.control.attempts import Attempt, Role, grace_of
from argosy.control.faults import message_of
from argosy.control.hostwants import HostWants
from argosy.control.identity import run_of
from argosy.control.supervisor import Supervisor
from argosy.protocol.messages import Launch, Reserve, Want, Wants

MOST_IN_MESSAGE = 2048
"""Wants in one message: a few MiB, whatever a host has."""


def wants_of(state: HostWants, runs: dict[str, Supervisor], runs_directory: str) -> Wants:
    """What a host has not been told yet."""
    attempts, changed_runs = state.changed_since(state.sent)
    wants = []
    for name, version in attempts:
        supervisor = runs.get(run_of(name))
        attempt = supervisor.attempts.get(name) if supervisor is not None else None
        if supervisor is None or attempt is None:
            wants.append(Want(attempt=name, version=version, state="gone"))
        else:
            wants.append(want_of(supervisor, attempt, version, runs_directory))
    reserves = []
    for run, version in changed_runs:
        supervisor = runs.get(run)
        is_over = supervisor is None or supervisor.ended is not None
        ports = {} if supervisor is None or is_over else supervisor.wanted_ports(state.host)
        if is_over or ports:
            reserves.append(Reserve(run=run, version=version, ports=ports))
    return Wants(
        since=state.sent,
        version=state.version,
        keeper=state.keeper,
        wants=wants,
        reserves=reserves,
    )


def pages_of(message: Wants, most: int) -> list[Wants]:
    """The same in messages of bounded size, of which a host makes one again."""
    everything: list[Want | Reserve] = [*message.wants, *message.reserves]
    if len(everything) <= most:
        return [message]
    return [
        Wants(
            since=message.since,
            version=message.version,
            keeper=message.keeper,
            wants=[each for each in everything[first : first + most] if isinstance(each, Want)],
            reserves=[e for e in everything[first : first + most] if isinstance(e, Reserve)],
            page=first // most,
            has_more=first + most < len(everything),
        )
        for first in range(0, len(everything), most)
    ]


def unlaunchable(
    state: HostWants,
    runs: dict[str, Supervisor],
    runs_directory: str,
    errors: tuple[type[Exception], ...],
) -> list[tuple[Supervisor, str]]:
    """The runs of which no want can be made, each once, and why."""
    found: dict[str, tuple[Supervisor, str]] = {}
    for name, version in state.changed_since(state.sent)[0]:
        supervisor = runs.get(run_of(name))
        attempt = supervisor.attempts.get(name) if supervisor is not None else None
        if supervisor is None or attempt is None or supervisor.run in found:
            continue
        try:
            want_of(supervisor, attempt, version, runs_directory)
        except errors as error:
            found[supervisor.run] = (supervisor, f"{name}: {error!r}")
    return list(found.values())


def want_of(supervisor: Supervisor, attempt: Attempt, version: int, runs_directory: str) -> Want:
    """What the attempt's host should make of it now."""
    role = supervisor.roles[attempt.role]
    reform = None
    if attempt.reform and attempt.rank is not None and attempt.generation == role.generation:
        reform = {
            "generation": attempt.generation,
            "rank": attempt.rank,
            "world_size": len(role.members),
        }
    if not attempt.is_alive:
        return Want(attempt=attempt.id, version=version, state="gone", reform=reform)
    launch = launch_of(supervisor, attempt, runs_directory)
    if attempt.stopping:
        return Want(attempt=attempt.id, version=version, state=attempt.stopping, launch=launch)
    return Want(
        attempt=attempt.id,
        version=version,
        state="running",
        launch=launch,
        reform=reform,
        faults=[message_of(fault) for fault in attempt.faults],
        progressed=attempt.step is not None,
    )


def launch_of(supervisor: Supervisor, attempt: Attempt, runs_directory: str) -> Launch:
    """The whole launch of one attempt."""
    submitted = supervisor.submitted
    role = supervisor.roles[attempt.role]
    spec = role.spec
    directory = f"{runs_directory}/{supervisor.run}"
    output = f"{directory}/logs/{attempt.role}.{attempt.index}.{attempt.number}"
    error_file = f"{directory}/errors/{attempt.id}.json"
    threads = _threads(supervisor, spec)
    return Launch(
        attempt=attempt.id,
        run=supervisor.run,
        role=attempt.role,
        index=attempt.index,
        program=_program(spec),
        python=spec.python or submitted.python,
        env_blob=submitted.role_env_blobs.get(attempt.role, submitted.env_blob),
        env=_environment(supervisor, role, attempt, directory, error_file),
        cwd=_joined(submitted.cwd, spec.cwd),
        umask=submitted.umask,
        limits=submitted.limits,
        affinity=_affinity(spec, attempt.index, submitted.affinity),
        stdout=f"{output}.out",
        stderr=f"{output}.out" if spec.tty else f"{output}.err",
        generation=attempt.generation,
        rank=attempt.rank,
        world_size=len(role.members) if spec.gang else 0,
        gang=spec.gang,
        parked=attempt.parked,
        preload=list(spec.preload),
        warm=spec.warm and spec.command is None,
        threads=threads,
        nice=spec.nice,
        memory_bytes=spec.memory_bytes,
        tty=spec.tty,
        ports=_own_ports(supervisor, attempt),
        secret_blobs={name: submitted.secret_blobs[name] for name in spec.secrets},
        error_file=error_file,
        stop_signal=spec.stop_signal,
        grace_seconds=grace_of(spec, has_joined=attempt.joined is not None),
        log_bytes=spec.log_bytes,
        probe=None if spec.ready is None else msgspec.to_builtins(spec.ready),
        hang_seconds=spec.hang_seconds,
    )


def _program(spec: RoleSpec) -> dict[str, Any]:
    if spec.command is not None:
        return {"kind": "exec", "argv": list(spec.command)}
    if spec.script is not None:
        return {"kind": "script", "path": spec.script, "args": list(spec.arguments)}
    return {"kind": "module", "name": spec.module, "args": list(spec.arguments)}


def _joined(base: str, path: str | None) -> str:
    if not path:
        return base
    return path if path.startswith("/") else f"{base.rstrip('/')}/{path}"


def _affinity(spec: RoleSpec, index: int, inherited: list[int]) -> list[int]:
    return [spec.cpus[index % len(spec.cpus)]] if spec.cpus else list(inherited)


def _threads(supervisor: Supervisor, spec: RoleSpec) -> int | None:
    """As torchrun: one thread for each rank of several, unless the user's own variable says how many."""
    if spec.threads is not None:
        return spec.threads
    is_set = "OMP_NUM_THREADS" in spec.env or "OMP_NUM_THREADS" in supervisor.submitted.env_names
    return 1 if spec.gang and spec.count > 1 and not is_set else None


def _own_ports(supervisor: Supervisor, attempt: Attempt) -> dict[str, int]:
    prefix = f"{attempt.role}/{attempt.index}/"
    held = supervisor.ports.get(attempt.host, ("", {}))[1]
    return {key[len(prefix) :]: port for key, port in held.items() if key.startswith(prefix)}


def _environment(
    supervisor: Supervisor, role: Role, attempt: Attempt, directory: str, error_file: str
) -> dict[str, str]:
    spec = role.spec
    env = {
        "ARGOSY_RUN": supervisor.run,
        "ARGOSY_RUN_NAME": supervisor.submitted.name,
        "ARGOSY_RUN_DIRECTORY": directory,
        "ARGOSY_ROLE": role.name,
        "ARGOSY_INDEX": str(attempt.index),
        "ARGOSY_RESTARTS": str(attempt.number),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    if supervisor.submitted.array_index is not None:
        env["ARGOSY_ARRAY_INDEX"] = str(supervisor.submitted.array_index)
    for _keeper, held in supervisor.ports.values():
        for key, port in held.items():
            env[port_variable(*key.split("/"))] = str(port)
    for name, port in _own_ports(supervisor, attempt).items():
        env[port_variable(name)] = str(port)
    if attempt.saving:
        env["ARGOSY_STOPPING"] = "1"
    threads = _threads(supervisor, spec)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    if spec.gang and attempt.rank is not None:
        env.update(gang_environment(supervisor, role, attempt))
    # The role's own variables win; their values are in its blob, only their names are known here.
    return {name: value for name, value in env.items() if name not in spec.env}


def gang_environment(supervisor: Supervisor, role: Role, attempt: Attempt) -> dict[str, str]:
    """The variables torchrun gives a worker, and the generation."""
    rank = attempt.rank or 0
    size = len(role.members)
    seat = role.seats[rank]
    return {
        "ARGOSY_GENERATION": str(attempt.generation),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(seat.local_rank),
        "LOCAL_WORLD_SIZE": str(seat.local_size),
        "GROUP_RANK": str(seat.group),
        "GROUP_WORLD_SIZE": str(seat.num_groups),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "ROLE_NAME": role.name,
        "TORCHELASTIC_RESTART_COUNT": str(attempt.generation - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(role.spec.budget.user),
        "TORCHELASTIC_RUN_ID": supervisor.run,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
