"""Commands of clients as the coordinator takes them: names, targets, what must be there and what must not.

Pure; each refusal says what is missing and the mend.
"""

from __future__ import annotations

import hashlib

import msgspec

from argosy.config.checks import MOST_LETTERS
from argosy.config.spec import RoleSpec, RunSpec
from argosy.control.placement import Placement, need_of
from argosy.control.supervisor import Supervisor
from argosy.errors import ConfigError, NotFoundError


class RunStopping(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was asked to end, and the command whose outcome will be in the log."""

    run: str
    name: str
    command: str
    was_queued: bool
    """It has never been started, and has ended with this."""


def is_meant(run: str, name: str, words: set[str]) -> bool:
    """Whether one of the words is the run's id, its name, or the name of the array it belongs to."""
    array = name.rpartition("[")[0] if name.endswith("]") else ""
    return not words.isdisjoint((run, name, array))


def check_secrets(spec: RunSpec, blobs: dict[str, str]) -> None:
    """Raise ConfigError for a secret that a role names and nobody gave."""
    for name, role in spec.roles.items():
        for secret in role.secrets:
            if secret not in blobs:
                raise ConfigError(
                    f"roles.{name}.secrets names {secret!r}, which was not given",
                    fix=f"submit the run with a value for {secret}: --secret {secret}, or secrets={{{secret!r}: …}}",
                )


def check_room(spec: RunSpec, placement: Placement) -> None:
    """Raise ConfigError for a run that would wait in the queue for ever, however much of the hosts becomes free."""
    if spec.queued and placement.hosts and not placement.could_ever(spec):
        raise ConfigError(
            f"the run needs {need_of(spec).describe()}, and {placement.describe()}: it would wait for ever",
            fix="ask for less with --cpus, --memory or -n; outside the queue (`argosy run`) they are not accounted",
        )


def without_values(spec: RunSpec) -> RunSpec:
    """The spec as the log may hold it: the roles' variables by name and digest."""
    roles = {name: _without_values(role) for name, role in spec.roles.items()}
    return msgspec.structs.replace(spec, roles=roles)


def _without_values(role: RoleSpec) -> RoleSpec:
    if not role.env:
        return role
    digests = {
        # Enough to see whether two values are equal, not what they are.
        name: "sha256:" + hashlib.sha256(value.encode()).hexdigest()[:16]
        for name, value in role.env.items()
    }
    return msgspec.structs.replace(role, env=digests)


def name_of(spec: RunSpec) -> str:
    """A name for a run that has none: that of its first program."""
    role = next(iter(spec.roles.values()))
    program = role.script or role.module or _program_of(role.command or ["run"])
    stem = program.rstrip("/").rpartition("/")[2]
    stem = stem.removesuffix(".py")
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in stem)
    return name[:MOST_LETTERS] or "run"


def _program_of(command: list[str]) -> str:
    """What a command runs; of an interpreter with a script, the script."""
    is_python = command[0].rpartition("/")[2].startswith("python")
    if is_python and len(command) > 1:
        after = command[2] if command[1] == "-m" and len(command) > 2 else command[1]
        return command[0] if after.startswith("-") else after
    return command[0]


def target_of(supervisor: Supervisor, role: str | None, index: int | None) -> str:
    """`RUN[/ROLE[/INDEX]]` as commands name it in the log; raises NotFoundError."""
    if role is None:
        return supervisor.run
    if role not in supervisor.roles:
        known = ", ".join(supervisor.roles)
        raise NotFoundError(f"run {supervisor.run} has no role {role}", fix=f"its roles: {known}")
    if index is None:
        return f"{supervisor.run}/{role}"
    count = len(supervisor.roles[role].processes)
    if not 0 <= index < count:
        raise NotFoundError(f"{role} has no process {index}", fix=f"use 0 to {count - 1}")
    return f"{supervisor.run}/{role}/{index}"
