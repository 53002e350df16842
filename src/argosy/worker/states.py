"""The small state that user code carries from step to step: `run.state`, committed and restored with the weights.

A mapping of names to what JSON can hold. The trainer takes `snapshot()` when a step commits and calls `restore()` in a rank that begins
elsewhere; equal values give equal bytes on every rank. Large things belong into the model's buffers or into files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from typing import Any

from argosy.errors import ConfigError

MOST_BYTES = 64 << 10


class State(MutableMapping[str, Any]):
    """Names to numbers, texts, lists and dicts of them."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"run.state[{name!r}]: a name is text", fix=f"use {str(name)!r}")
        _encode({name: value})
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"State({self._values!r})"

    def snapshot(self) -> bytes:
        """All values as JSON, in the order of their names."""
        data = _encode(self._values)
        if len(data) > MOST_BYTES:
            raise ConfigError(
                f"run.state has {len(data)} bytes, more than {MOST_BYTES}",
                fix="keep large things in the model's buffers or in files",
            )
        return data

    def restore(self, data: bytes) -> None:
        """Take the values of a snapshot in place of the present ones; empty bytes: none."""
        values = json.loads(data) if data else {}
        if not isinstance(values, dict):
            raise ConfigError("a snapshot of run.state is no JSON object", fix="restore another")
        self._values.clear()
        self._values.update(values)


def _encode(values: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        names = ", ".join(map(str, values))
        raise ConfigError(
            f"run.state cannot hold {names}: {error}",
            fix="use numbers, texts, lists and dicts; `tensor.tolist()` makes one of a small tensor",
        )
    return text.encode()
