"""Ports of a run: the variables by which its processes find them, and what must not be the same.

`port_variable` is used by whoever publishes them (control/launching.py); `check_ports` belongs to the checks of a spec. Pure.
"""

from __future__ import annotations

from argosy.config.spec import RunSpec
from argosy.errors import ConfigError


def port_variable(*parts: object) -> str:
    """`port_variable("web", 0, "http")` is ARGOSY_PORT_WEB_0_HTTP."""
    return "_".join(["ARGOSY_PORT", *(str(part).replace("-", "_").upper() for part in parts)])


def check_ports(spec: RunSpec) -> None:
    """Raise ConfigError for two ports that one process would find under one name, and for a number that is given twice."""
    numbers: dict[int, str] = {}
    published: dict[str, str] = {}
    for role_name, role in spec.roles.items():
        for name, number in role.ports.items():
            where = f"roles.{role_name}.ports.{name}"
            if number and number in numbers:
                fix = "give each a number of its own, or 0: the runtime chooses"
                raise ConfigError(f"{numbers[number]} and {where} are both {number}", fix=fix)
            numbers[number] = where
            for index in range(role.count + role.spares):
                _publish(published, port_variable(role_name, index, name), where)
    for role_name, role in spec.roles.items():
        own = dict(published)
        for name in role.ports:
            _publish(own, port_variable(name), f"roles.{role_name}.ports.{name}")


def _publish(published: dict[str, str], variable: str, where: str) -> None:
    if variable in published:
        raise ConfigError(
            f"{published[variable]} and {where} are both published as {variable}",
            fix="rename a role or a port: capitals, and - or _, make no difference",
        )
    published[variable] = where
