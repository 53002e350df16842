"""Checks of a RunSpec beyond its types: counts, names, dependencies, probes, signals; and the order of start.

Called for every submission, by the client for a quick answer and by the controller for a sure one. Pure: whether a
script or command exists is asked elsewhere. Each refusal names the place in the spec and the mend.
"""

from __future__ import annotations

import math
import re
import signal

from argosy.config.nearest import nearest
from argosy.config.ports import check_ports
from argosy.config.spec import Probe, RoleSpec, RunSpec
from argosy.errors import ConfigError

MOST_LETTERS = 100
"""Of a name: names of files are made of them, together with indices and endings."""
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MOST_LETTERS}}}")
_RUN_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MOST_LETTERS}}}(\[[0-9]+\])?")
MOST_PROCESSES = 10_000
MOST_RUNS = 100_000


def check_spec(spec: RunSpec) -> None:
    """Raise ConfigError for the first thing that is wrong with the spec."""
    if spec.name and not _RUN_NAME.fullmatch(spec.name):
        raise _bad_name("name", spec.name)
    if spec.share and not _RUN_NAME.fullmatch(spec.share):
        raise _bad_name("share", spec.share)
    if not spec.roles:
        raise ConfigError("roles is empty", fix="name at least one role with a command or script")
    _at_least("array", spec.array, 0)
    if spec.array > MOST_RUNS:
        raise ConfigError(f"array = {spec.array} is too large", fix=f"use at most {MOST_RUNS}")
    for name, role in spec.roles.items():
        if not _NAME.fullmatch(name):
            raise _bad_name("role", name)
        check_role(f"roles.{name}", role)
        for field in ("after", "after_ready"):
            for other in getattr(role, field):
                _known_role(spec, name, field, other)
    total = sum(role.count + role.spares for role in spec.roles.values())
    if total > MOST_PROCESSES:
        raise ConfigError(f"the run has {total} processes", fix=f"use at most {MOST_PROCESSES}")
    check_ports(spec)
    start_order(spec)


def start_order(spec: RunSpec) -> list[str]:
    """Roles in order of start: after what they depend on, otherwise as they are written."""
    done: list[str] = []
    left = list(spec.roles)
    while left:
        for name in left:
            role = spec.roles[name]
            if all(other in done for other in (*role.after, *role.after_ready)):
                break
        else:
            raise ConfigError(
                f"the roles {', '.join(left)} wait for each other: {_cycle(spec, left)}",
                fix="take one of them out of after or after_ready",
            )
        done.append(name)
        left.remove(name)
    return done


def _cycle(spec: RunSpec, left: list[str]) -> str:
    path = [left[0]]
    while True:
        role = spec.roles[path[-1]]
        following = next(o for o in (*role.after, *role.after_ready) if o in left)
        if following in path:
            return " -> ".join([*path[path.index(following) :], following])
        path.append(following)


def check_role(where: str, role: RoleSpec) -> None:
    """Raise ConfigError for the first thing that is wrong with one role."""
    given = [name for name in ("command", "script", "module") if getattr(role, name) is not None]
    if len(given) != 1:
        what = " and ".join(given) if given else "none of command, script, module"
        raise ConfigError(
            f"{where} gives {what}", fix="give exactly one of command, script, module"
        )
    _check_program(where, role)
    _check_counts(where, role)
    _check_limits(where, role)
    for name, number in role.ports.items():
        if not _NAME.fullmatch(name):
            raise _bad_name(f"{where}.ports", name)
        if not 0 <= number <= 65535:
            raise ConfigError(
                f"{where}.ports.{name} = {number} is no port", fix="use 1 to 65535, or 0 for any"
            )
        if number and role.count + role.spares > 1:
            raise ConfigError(
                f"{where}.ports.{name} = {number} cannot be held by {role.count} processes",
                fix="use 0: each process gets its own",
            )
    _check_secrets(f"{where}.secrets", role.secrets)
    for key in role.env:
        if not key or "=" in key or "\0" in key:
            raise ConfigError(
                f"{where}.env has the name {key!r}", fix="use a name without = or NUL"
            )
    if role.ready is not None:
        _check_probe(f"{where}.ready", role, role.ready)
    _check_signal(f"{where}.stop_signal", role.stop_signal)


def _check_secrets(where: str, secrets: list[str]) -> None:
    """Each becomes a variable, ARGOSY_SECRET_<NAME>_FD in capitals."""
    for secret in secrets:
        if not (secret.isascii() and secret.isidentifier()):
            fix = "use letters, digits and _, and no digit first"
            raise ConfigError(f"{where}: {secret!r} is no name of a secret", fix=fix)
        if sum(other.upper() == secret.upper() for other in secrets) > 1:
            fix = "give each a name of its own; capitals do not count"
            raise ConfigError(f"{where} names {secret!r} twice", fix=fix)


def _check_program(where: str, role: RoleSpec) -> None:
    if role.command is not None:
        if not role.command or not role.command[0]:
            raise ConfigError(f"{where}.command is empty", fix="name the program to start")
        if role.arguments:
            raise ConfigError(
                f"{where}.arguments belongs to script or module", fix="put them into command"
            )
    elif not (role.script or role.module):
        raise ConfigError(f"{where}.script or .module is empty", fix="name the program to start")


def _check_counts(where: str, role: RoleSpec) -> None:
    _at_least(f"{where}.count", role.count, 1)
    _at_least(f"{where}.spares", role.spares, 0)
    if role.min is not None:
        _at_least(f"{where}.min", role.min, 1)
        if role.min > role.count:
            raise ConfigError(
                f"{where}.min = {role.min} is more than count = {role.count}",
                fix=f"use a min of at most {role.count}",
            )
    for field in ("min", "spares"):
        if getattr(role, field) and not role.gang:
            raise ConfigError(
                f"{where}.{field} needs a gang", fix=f"set gang = true or drop {field}"
            )
    if role.gang and role.tty and role.count > 1:
        raise ConfigError(
            f"{where}.tty with {role.count} processes", fix="use one process, or no tty"
        )


def _check_limits(where: str, role: RoleSpec) -> None:
    for field in ("cpu_request", "memory_request_bytes", "grace_seconds", "hang_seconds"):
        _at_least(f"{where}.{field}", getattr(role, field) or 0, 0)
    _at_least(f"{where}.log_bytes", role.log_bytes, 1)
    if role.threads is not None:
        _at_least(f"{where}.threads", role.threads, 1)
    if role.memory_bytes is not None:
        _at_least(f"{where}.memory_bytes", role.memory_bytes, 1)
    if not -20 <= role.nice <= 19:
        raise ConfigError(f"{where}.nice = {role.nice} is no nice level", fix="use -20 to 19")
    if role.cpus is not None:
        if not role.cpus:
            raise ConfigError(f"{where}.cpus is empty", fix="name CPUs or drop it")
        for cpu in role.cpus:
            _at_least(f"{where}.cpus", cpu, 0)
    counts = ("user", "host", "hang", "preemption", "period_seconds", "no_progress", "same_error")
    for field in counts:
        _at_least(f"{where}.budget.{field}", getattr(role.budget, field), 0)
    for field in ("first_seconds", "most_seconds"):
        _at_least(f"{where}.backoff.{field}", getattr(role.backoff, field), 0)
    if not 0 <= role.backoff.jitter <= 1:
        raise ConfigError(f"{where}.backoff.jitter = {role.backoff.jitter}", fix="use 0 to 1")


def _check_probe(where: str, role: RoleSpec, probe: Probe) -> None:
    kinds = ("port", "http", "file", "command")
    given = [kind for kind in kinds if getattr(probe, kind) is not None]
    if len(given) != 1:
        what = " and ".join(given) if given else "nothing"
        raise ConfigError(f"{where} gives {what}", fix=f"give exactly one of {', '.join(kinds)}")
    port = probe.port if probe.port is not None else (probe.http or "").partition("/")[0]
    if (probe.port is not None or probe.http is not None) and port not in role.ports:
        raise ConfigError(
            f"{where} names the port {port!r}, which the role does not have",
            fix=_did_you_mean(port, list(role.ports), "add it to ports"),
        )
    if probe.command is not None and not probe.command:
        raise ConfigError(f"{where}.command is empty", fix="name the program to start")
    for field in ("every_seconds", "timeout_seconds"):
        if not 0 < getattr(probe, field) < math.inf:
            raise ConfigError(
                f"{where}.{field} = {getattr(probe, field)} is no time",
                fix="use more than 0 seconds",
            )


def _check_signal(where: str, name: str) -> None:
    known = [each.name for each in signal.Signals]
    if name not in known:
        raise ConfigError(
            f"{where} = {name!r} is no signal", fix=_did_you_mean(name, known, "use SIGTERM")
        )


def _known_role(spec: RunSpec, name: str, field: str, other: str) -> None:
    if other == name:
        raise ConfigError(f"roles.{name}.{field} names itself", fix="take it out")
    if other not in spec.roles:
        raise ConfigError(
            f"roles.{name}.{field} names the role {other!r}, which the run does not have",
            fix=_did_you_mean(other, list(spec.roles), "add it or take it out"),
        )


def _did_you_mean(word: str, known: list[str], otherwise: str) -> str:
    by_lower_case = {each.lower(): each for each in known}
    close = by_lower_case.get(nearest(word, by_lower_case), "")
    return f"did you mean {close!r}?" if close else otherwise


def _at_least(where: str, value: float, least: float) -> None:
    if value != value or value == math.inf:
        raise ConfigError(f"{where} = {value} is no number to count with", fix="use a finite one")
    if value < least:
        raise ConfigError(f"{where} = {value} is less than {least}", fix=f"use {least} or more")


def _bad_name(where: str, name: str) -> ConfigError:
    return ConfigError(
        f"{where}: {name!r} is no name", fix=f"use 1 to {MOST_LETTERS} letters, digits, - and _"
    )
