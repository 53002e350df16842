"""Resizing a gang: whether a size may be asked for, and where the processes go that are then needed in addition.

Called by the coordinator for `argosy scale`; pure. What follows from a size is decided in membership.py. The room of members
that leave is kept for the run until its end, so a gang that shrinks can always grow back.
"""

from __future__ import annotations

import msgspec

from argosy.config.spec import RunSpec
from argosy.control.attempts import Role
from argosy.control.membership import free_indices, is_ending
from argosy.control.placement import Placement
from argosy.control.supervisor import Supervisor
from argosy.errors import ConfigError, NotFoundError

MOST_MEMBERS = 4096
_WHO_JOINS = "programs with a trainer or `argosy.join()` join a moment after their start, a plain script never does"


def check_resize(supervisor: Supervisor, role: Role, size: int, *, may_restart: bool) -> None:
    """Raise ConfigError or NotFoundError when the gang cannot have this size now."""
    run, name = supervisor.run, role.name
    if supervisor.ended is not None:
        raise NotFoundError(f"run {run} has {supervisor.ended.outcome}", fix="start a new one")
    if not role.spec.gang:
        raise ConfigError(
            f"{name} is not a gang", fix="only gangs (`argosy run -n RANKS`) are resized"
        )
    if size < 1:
        raise ConfigError(f"a gang of {size} does no work", fix=f"`argosy stop {run}` ends it")
    if size > MOST_MEMBERS:
        raise ConfigError(f"{size} members are too many", fix=f"use {MOST_MEMBERS} or fewer")
    if role.spec.min is not None and size < role.spec.min:
        raise ConfigError(
            f"{size} is below the least that {name} goes on with (--min {role.spec.min})",
            fix=f"use {role.spec.min} or more",
        )
    if supervisor.stop is not None:
        raise ConfigError(f"run {run} is being stopped: {supervisor.stop.reason}")
    if supervisor.admitted is None or not role.generation:
        raise ConfigError(f"{name} has not started yet", fix="try again when it has")
    if role.spec.ports:
        raise ConfigError(f"the processes of {name} hold ports, which are given once for all")
    _check_bounds(role, size)
    if is_ending(role):
        raise ConfigError(f"{name} is about to end: a member has finished its work")
    if not role.can_join:
        _check_restart(role, may_restart)


def _check_bounds(role: Role, size: int) -> None:
    """What the trainer of its members can do with so many."""
    bounds = role.bounds
    if bounds is None or bounds.least <= size <= bounds.most:
        return
    if bounds.least == bounds.most:
        fix = "stop it, and resume it with another number of ranks"
    elif size > bounds.most:
        fix = f"use {bounds.most} or fewer"
    else:
        fix = f"use {bounds.least} or more"
    raise ConfigError(f"{role.name} cannot have {size} ranks: {bounds.why}", fix=fix)


def _check_restart(role: Role, may_restart: bool) -> None:
    if role.policy == "temporary" or role.spec.budget.user == 0:
        raise ConfigError(
            f"the ranks of {role.name} have not joined, so none can stay when the size changes; and they are not to be restarted",
            fix=f"{_WHO_JOINS}; others are stopped and started anew with another -n",
        )
    if not may_restart:
        raise ConfigError(
            f"the ranks of {role.name} have not joined, so none can stay when the size changes: all would start again",
            fix=f"if that is wanted, add --restart; {_WHO_JOINS}",
        )


def place_additional(
    supervisor: Supervisor, role: Role, size: int, placement: Placement
) -> list[str]:
    """Hosts of the processes that the role must have in addition; ConfigError when there is no room."""
    remaining = [i for i in role.members if not role.processes[i].retired]
    count = size - len(remaining) - len(free_indices(role))
    if count <= 0:
        return []
    spec = msgspec.structs.replace(role.spec, count=count, spares=0)
    alone = RunSpec(roles={role.name: spec})
    beside = placement.hosts.get(role.processes[role.members[0]].host)
    cpus, memory = spec.cpu_request * count, spec.memory_request_bytes * count
    is_accounted = supervisor.spec.queued
    if beside is not None and (not is_accounted or beside.fits(cpus, memory)):
        return [beside.host] * count  # ranks on one host share memory
    hosts = placement.place(alone, is_accounted=is_accounted)
    if hosts is None:
        raise ConfigError(
            f"there is no room for {count} more: they need {cpus:g} CPUs, {placement.free_cpus:g} are free",
            fix="wait for other runs to end",
        )
    return hosts[role.name]
