"""Spec files: TOML (or plain objects) to a RunSpec, with overrides.

Called by `argosy run SPEC.toml`, `argosy queue add` and by Python users (`load_spec`). An unknown key is an error that gives
its dotted path and the nearest known key; a wrong type gives the path and what was expected. What the values mean together
(cycles, ranges) is checked by config/checks.py.
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from argosy.config.checks import check_spec
from argosy.config.nearest import did_you_mean, nearest
from argosy.config.overrides import apply_overrides
from argosy.config.spec import RoleSpec, RunSpec
from argosy.errors import ConfigError

MOST_FILE_BYTES = 4 << 20
_MEANT = {
    "cmd": "command", "entrypoint": "command", "program": "script", "args": "arguments", "argv": "arguments",
    "environment": "env", "variables": "env", "workdir": "cwd", "working-dir": "cwd", "dir": "cwd", "directory": "cwd",
    "n": "count", "ranks": "count", "replicas": "count", "nproc": "count", "nproc-per-node": "count", "size": "count",
    "min-ranks": "min", "depends-on": "after", "needs": "after", "requires": "after", "health": "ready",
    "healthcheck": "ready", "probe": "ready", "retries": "budget", "restarts": "budget", "max-restarts": "budget",
    "interpreter": "python", "pin": "cpus", "affinity": "cpus", "timeout": "grace_seconds", "terminal": "tty",
    "title": "name", "queue": "queued", "daemon": "service",
}  # fmt: skip
"""What other tools call the same."""


def load_spec(path: str | Path, overrides: Iterable[str] = ()) -> RunSpec:
    """Read a TOML file, apply `key=value` overrides, convert and check. The run is named after the file by default."""
    document = read_document(path)
    spec = make_spec(apply_overrides(document, overrides), source=str(path))
    if not spec.name:
        spec = msgspec.structs.replace(spec, name=default_name(str(path)))
    check_spec(spec)
    return spec


def default_name(path: str) -> str:
    """The file's name without its ending, in the letters that a run's name may have."""
    stem = path.rstrip("/").rsplit("/", 1)[-1]
    stem = stem[: stem.rindex(".")] if "." in stem[1:] else stem
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_")[:64]


def read_document(path: str | Path) -> dict[str, Any]:
    """The file as plain objects; every way in which a file can be unreadable is a ConfigError."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_FILE_BYTES + 1)
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory", fix="name a TOML file in it")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", fix="check the path of the spec")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", fix="check its permissions")
    if len(data) > MOST_FILE_BYTES:
        raise ConfigError(
            f"{path} is larger than {MOST_FILE_BYTES >> 20} MiB", fix="split the spec"
        )
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", fix="save it as UTF-8")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", fix="mend the line named above")


def make_spec(document: dict[str, Any], *, source: str = "the spec") -> RunSpec:
    """Convert plain objects into a RunSpec; no check of meaning."""
    _refuse_unknown_keys(document, RunSpec, "", source)
    if "roles" not in document:
        raise ConfigError(
            f"{source}: there is no role in it",
            fix='add one: [roles.main] with command = ["program", "argument"]',
        )
    roles = document["roles"]
    # Role by role first: msgspec's own path says `roles[...]` and leaves out which.
    for role, below in roles.items() if isinstance(roles, dict) else ():
        _convert(below, RoleSpec, f"roles.{role}", source)
    spec: RunSpec = _convert(document, RunSpec, "", source)
    return spec


def _convert(value: Any, struct: Any, where: str, source: str) -> Any:
    try:
        return msgspec.convert(value, struct)
    except msgspec.ValidationError as error:
        what, _, below = str(error).partition(" - at `")
        path = f"{where}{below.rstrip('`').removeprefix('$')}".strip(".")
        at = f" at `{path}`" if path else ""
        raise ConfigError(f"{source}: {what}{at}", fix=_type_fix(what, struct, path))


def _refuse_unknown_keys(value: Any, type_: Any, path: str, source: str) -> None:
    """Walk document and type together; msgspec would name the key, but neither all of its path nor the nearest."""
    struct, values = _struct_in(type_)
    if struct is None or not isinstance(value, dict):
        return
    if values:
        for key, below in value.items():
            _refuse_unknown_keys(below, struct, f"{path}.{key}" if path else key, source)
        return
    hints = typing.get_type_hints(struct)
    known = struct.__struct_fields__
    for key, below in value.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            raise ConfigError(f"{source}: unknown key `{where}`", fix=_key_fix(key, below, struct))
        _refuse_unknown_keys(below, hints[key], where, source)


def _key_fix(key: str, value: Any, struct: Any) -> str:
    """The nearest key; or where this one belongs, if it is one of another table."""
    run_keys, role_keys = RunSpec.__struct_fields__, RoleSpec.__struct_fields__
    if struct is RunSpec and key in role_keys:
        return f"it belongs to a role: write it below [roles.NAME], or say --set roles.NAME.{key}"
    if struct is RunSpec and isinstance(value, dict) and not nearest(key, run_keys):
        return f"a role is written [roles.{key}]"
    if struct is RoleSpec and key in run_keys:
        return "it belongs to the run: write it above the first [roles.NAME]"
    return did_you_mean(key, struct.__struct_fields__, meant=_MEANT)


def _struct_in(type_: Any) -> tuple[Any, bool]:
    """The Struct inside a type: (Struct, False) for it or Optional of it, (Struct, True) for a dict of them."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return type_, False
    arguments = typing.get_args(type_)
    if typing.get_origin(type_) is dict:
        struct, _ = _struct_in(arguments[1])
        return struct, True
    for argument in arguments:
        if isinstance(argument, type) and issubclass(argument, msgspec.Struct):
            return argument, False
    return None, False


def _choices(hint: Any) -> list[str]:
    """The words of a Literal, also of one that may be left out."""
    if typing.get_origin(hint) is typing.Literal:
        return list(map(str, typing.get_args(hint)))
    return [word for below in typing.get_args(hint) for word in _choices(below)]


def _type_fix(what: str, struct: Any, path: str) -> str:
    if what.startswith("Invalid enum value"):
        hint = typing.get_type_hints(struct).get(path.rsplit(".", 1)[-1])
        return f"use one of: {', '.join(_choices(hint))}"
    if "Expected `array" in what:
        return 'write a list: ["program", "argument"]'
    if "Expected `str" in what:
        return "put the value in quotes"
    return "give a value of that type"
