"""Overrides: `--set key=value` applied to the plain objects that a spec is made from.

Called by config/files.py before the spec is converted, so that a wrong type or an unknown key is reported the same way
wherever it came from. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from argosy.config.nearest import did_you_mean
from argosy.errors import ConfigError


def parse_override(text: str) -> tuple[list[str], Any]:
    """`roles.train.count=4` as (path, value); the value is TOML, or else the text itself."""
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(
            f"--set {text!r} is not key=value", fix="write it like --set roles.train.count=4"
        )
    return path, parse_value(value.strip())


def parse_value(text: str) -> Any:
    """A TOML value (`4`, `0.5`, `true`, `[1, 2]`, `"text"`); what is none of these is text."""
    import tomllib

    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A second key smuggled in by a line break is text, not TOML.
    return parsed["value"] if list(parsed) == ["value"] else text


def apply_overrides(document: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The document with the overrides applied, later ones winning; the given document is not changed."""
    result: dict[str, Any] = _copy(document)
    for text in overrides:
        path, value = parse_override(text)
        _check_role(result, path, text)
        place = result
        for depth, key in enumerate(path[:-1]):
            below = place.setdefault(key, {})
            if not isinstance(below, dict):
                where = ".".join(path[: depth + 1])
                raise ConfigError(
                    f"--set {text!r}: `{where}` is {below!r}, not a table",
                    fix=f"set `{where}` itself, or a key that exists",
                )
            place = below
        place[path[-1]] = value
    return result


def _check_role(document: dict[str, Any], path: list[str], text: str) -> None:
    """A misspelt role would otherwise be a new one; a new one begins with what it starts."""
    roles = document.get("roles")
    if len(path) < 3 or path[0] != "roles" or not isinstance(roles, dict) or not roles:
        return
    if path[1] not in roles and path[2] not in ("command", "script", "module"):
        raise ConfigError(
            f"--set {text!r}: there is no role {path[1]!r}", fix=did_you_mean(path[1], roles)
        )


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(below) for key, below in value.items()}
    return value
