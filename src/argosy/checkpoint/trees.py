"""What is no tensor, to JSON and back: dicts, lists, tuples, numbers, texts; never an object of a class, never pickle.

Where JSON has no word, an object with one `$` key stands for the value. Tensors and bytes are leaves that the caller stores elsewhere and names
here. Pure; used by the registry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from argosy.checkpoint import names
from argosy.errors import CheckpointDamaged, ConfigError

Store = Callable[[str, Any], "dict[str, Any] | None"]
"""(path, value) → what stands for a value that is stored elsewhere; None for one that is not its business."""
Fetch = Callable[[str, str], Any]
"""("$tensor", "$array" or "$bytes", name) → the value."""

_PLAIN = (str, bool, int, type(None))
_NAMED = ("$tensor", "$array", "$bytes")


class ValuesUnfit(CheckpointDamaged):
    """Every byte is as it was written, and makes no sense to the state that it is loaded into: to another it may."""


def encode(value: Any, store: Store, path: str = "", depth: int = 0) -> Any:
    """A tree that JSON can hold; ConfigError names the place of what it cannot."""
    if depth > names.MOST_DEPTH:
        raise ConfigError(f"{path} is nested deeper than {names.MOST_DEPTH}", fix="flatten it")
    if type(value) is str:
        return _checked(value, path)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, np.generic):
        value = value.item()
        if type(value) in _PLAIN:
            return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, complex):
        return {"$complex": [encode(part, store, path) for part in (value.real, value.imag)]}
    if isinstance(value, (list, tuple)):
        found = [
            encode(one, store, _joined(path, place), depth + 1) for place, one in enumerate(value)
        ]
        return {"$tuple": found} if isinstance(value, tuple) else found
    if isinstance(value, Mapping):
        return _encode_mapping(value, store, path, depth)
    stored = store(path, value)
    if stored is None:
        kind = type(value).__name__ + (f" of {value.dtype}" if type(value) is np.ndarray else "")
        raise ConfigError(
            f"{path} is a {kind}, which a checkpoint cannot hold",
            fix="give tensors, numpy arrays, bytes, numbers, texts, lists and dicts of them, or an object with state_dict()",
        )
    return stored


def _checked(text: str, path: str) -> str:
    """A text that has a form in bytes; half of a character has none."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{path} has the text {text!r}, which is not Unicode",
                fix="keep it as bytes: text.encode(errors='surrogateescape')",
            )
    return text


def _encode_mapping(value: Mapping[Any, Any], store: Store, path: str, depth: int) -> Any:
    is_plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if is_plain:
        return {
            _checked(key, path): encode(one, store, _joined(path, key), depth + 1)
            for key, one in value.items()
        }
    pairs = []
    for key, one in value.items():
        if not isinstance(key, (str, int, float, bool, tuple, type(None))):
            raise ConfigError(
                f"{path} has a {type(key).__name__} as a key",
                fix="use texts or numbers as keys",
            )
        inside = _joined(path, key)
        pairs.append([encode(key, store, path, depth + 1), encode(one, store, inside, depth + 1)])
    return {"$items": pairs}


def decode(tree: Any, fetch: Fetch) -> Any:
    """The value of a tree."""
    if isinstance(tree, list):
        return [decode(one, fetch) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((word, content),) = tree.items()
        if word.startswith("$"):
            return _decode_word(word, content, fetch)
    return {key: decode(one, fetch) for key, one in tree.items()}


def _decode_word(word: str, content: Any, fetch: Fetch) -> Any:
    try:
        if word == "$tuple":
            return tuple(decode(one, fetch) for one in content)
        if word == "$items":
            return {decode(key, fetch): decode(one, fetch) for key, one in content}
        if word == "$float":
            return float(content)
        if word == "$complex":
            return complex(*(decode(one, fetch) for one in content))
    except (TypeError, ValueError):
        raise CheckpointDamaged(f"{names.VALUES} has {word} of {content!r}")
    if word in _NAMED and isinstance(content, str):
        return fetch(word, content)
    raise ConfigError(
        f"{names.VALUES} has the word {word!r}, which this program does not know",
        fix="read it with the program that wrote it",
    )


def renamed(tree: Any, other: Mapping[str, str]) -> Any:
    """The tree with other names for some of its tensors."""
    if isinstance(tree, list):
        return [renamed(one, other) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((word, content),) = tree.items()
        if word in _NAMED:
            return {word: other.get(content, content)}
    return {key: renamed(one, other) for key, one in tree.items()}


def write(values: Mapping[str, Any]) -> bytes:
    """The bytes of extra.json."""
    data = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    if len(data) > names.MOST_VALUES_BYTES:
        raise ConfigError(
            f"values take {len(data)} bytes, {names.MOST_VALUES_BYTES} are allowed",
            fix="keep large things in tensors or bytes",
        )
    return data


def read(data: bytes, what: str) -> dict[str, Any]:
    """The trees of extra.json by key."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or _depth(found) > 4 * names.MOST_DEPTH:
        raise CheckpointDamaged(f"{what} is no JSON object", fix="use another checkpoint")
    return found


def _depth(tree: Any) -> int:
    deepest, level = 0, [tree]
    while level and deepest <= 4 * names.MOST_DEPTH:
        below: list[Any] = []
        for one in level:
            below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        deepest, level = deepest + 1, below
    return deepest


def _joined(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
