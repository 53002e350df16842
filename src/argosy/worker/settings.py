"""The typed config of a program: a dataclass, changed by `--set key=value`.

Called by `launch` before anything is started. A key that does not exist is an error that names the nearest one, a value of another
type one that names the type; fields of nested dataclasses are reached by dots. Pure: reads no file and no environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any

import msgspec

from argosy.config.nearest import did_you_mean
from argosy.config.overrides import parse_value
from argosy.errors import ConfigError

_Tree = dict[str, Any]
"""Keys to texts, or to trees for what stands before a dot."""


def build_config(config_type: type[Any], overrides: Iterable[str]) -> Any:
    """The config with the overrides applied, later ones winning."""
    if not dataclasses.is_dataclass(config_type):
        raise ConfigError(
            f"the config of a program is a dataclass, not {config_type!r}",
            fix="write @dataclass above the class",
        )
    return _build(config_type, _plant(overrides), None, "")


def parse_keys(overrides: Iterable[str]) -> list[str]:
    """The dotted keys that the overrides change."""
    return [_split(text)[0] for text in overrides]


def to_plain(config: Any) -> Any:
    """The config as what JSON can hold; other objects as their text."""
    if config is None:
        return {}
    # As it will be read back from a file: lists for tuples.
    return json.loads(json.dumps(msgspec.to_builtins(config, enc_hook=str)))


def digest(plain: Any) -> str:
    """SHA-256 of a plain config: equal for equal values, whatever the order of fields."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def flatten(plain: Any, prefix: str = "") -> dict[str, Any]:
    """A plain config with dotted keys."""
    if not isinstance(plain, dict) or (not plain and prefix):
        return {prefix.rstrip("."): plain}
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat |= flatten(value, f"{prefix}{key}.")
    return flat


def describe_fields(config_type: type[Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, type, default) of every field, those of nested dataclasses by dots."""
    hints = typing.get_type_hints(config_type)
    rows: list[tuple[str, str, str]] = []
    for field in dataclasses.fields(config_type):
        below = _dataclass_in(hints[field.name])
        if below is not None:
            rows += describe_fields(below, f"{prefix}{field.name}.")
        elif field.init:
            default = _default(field)
            shown = "required" if default is dataclasses.MISSING else repr(default)
            rows.append((f"{prefix}{field.name}", _type_name(hints[field.name]), shown))
    return rows


def _plant(overrides: Iterable[str]) -> _Tree:
    tree: _Tree = {}
    for text in overrides:
        key, value = _split(text)
        *above, last = key.split(".")
        place = tree
        for part in above:
            below = place.get(part)
            if not isinstance(below, dict):
                below = place[part] = {}
            place = below
        place[last] = value
    return tree


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(f"--set {text!r} is not key=value", fix="write it like --set depth=4")
    return ".".join(parts), value.strip()


def _build(config_type: type[Any], tree: _Tree, base: Any, path: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(config_type) if field.init}
    hints = typing.get_type_hints(config_type)
    values: dict[str, Any] = {}
    for key, given in tree.items():
        where = f"{path}{key}"
        if key not in fields:
            raise ConfigError(f"unknown key `{where}`", fix=did_you_mean(key, fields))
        below = _dataclass_in(hints[key])
        if isinstance(given, dict):
            if below is None:
                raise ConfigError(
                    f"`{where}` has no fields: it is of type {_type_name(hints[key])}",
                    fix=f"set it as a whole: --set {where}=VALUE",
                )
            own = getattr(base, key) if base is not None else _default(fields[key])
            own = None if own is dataclasses.MISSING else own
            values[key] = _build(below, given, own, f"{where}.")
        elif below is not None and given not in ("none", "None", "null"):
            names = [field.name for field in dataclasses.fields(below)]
            raise ConfigError(
                f"`{where}` is a group of fields, not a value",
                fix=f"set one of them, e.g. --set {where}.{names[0] if names else 'FIELD'}=VALUE",
            )
        else:
            values[key] = _convert(given, hints[key], where)
    return _make(config_type, fields, values, base, path)


def _make(
    config_type: type[Any], fields: dict[str, Any], values: dict[str, Any], base: Any, path: str
) -> Any:
    missing = [
        name
        for name, field in fields.items()
        if base is None and name not in values and _default(field) is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(
            f"`{path}{missing[0]}` has no default and was not given",
            fix=f"--set {path}{missing[0]}=VALUE",
        )
    try:
        return dataclasses.replace(base, **values) if base is not None else config_type(**values)
    except (ValueError, TypeError, AssertionError) as error:
        # What the class itself checks, in __post_init__ as a rule.
        raise ConfigError(
            f"the config is refused by {config_type.__name__}: {error}", fix="change that value"
        )


def _convert(text: str, hint: Any, where: str) -> Any:
    if text in ("None", "null", "none") and type(None) in typing.get_args(hint):
        return None
    refusal = ""
    try:
        for is_strict, value in _readings(text):
            try:
                return msgspec.convert(value, hint, strict=is_strict, dec_hook=_decode)
            except msgspec.ValidationError as error:
                refusal = refusal or str(error).partition(" - at `")[0]
    except TypeError:
        raise ConfigError(
            f"`{where}` is of type {_type_name(hint)}, which has no text form",
            fix="set it in the program",
        )
    raise ConfigError(
        f"--set {where}={text}: {refusal[:1].lower()}{refusal[1:]}",
        fix=f"give a value of type {_type_name(hint)}",
    )


def _readings(text: str) -> Iterator[tuple[bool, Any]]:
    """What a text may mean, the likeliest first: a field of text takes what looks like a number; `.5` is no TOML and still one."""
    yield True, parse_value(text)
    yield False, text
    with contextlib.suppress(ValueError):
        yield True, float(text)


def _decode(hint: Any, value: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, PurePath):
        if not isinstance(value, str):
            raise ValueError(f"Expected a path, got {value!r}")
        return Path(value) if hint in (Path, PurePath) else hint(value)
    raise TypeError(f"{hint} cannot be set")


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass that a field holds, alone or as one of several types."""
    for candidate in (hint, *typing.get_args(hint)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
