"""Environments at launch: what a warm parent must be started with, and what this host adds for its ranks.

The agent passes every spawn order of its decider through here. Variables that libraries read when they are loaded decide which warm parent
a process may be forked from; the values come from the submitter's sealed environment and go to the keeper alone.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from argosy.control.loadtime import load_time, own_load_time
from argosy.native import isa

_MOST_CACHED = 64


class LaunchEnvironments:
    """Reads submitters' environments and completes spawn orders with them."""

    def __init__(self, read_blob: Callable[[str], bytes | None]) -> None:
        """`read_blob` gives a blob's content, or None when this agent does not hold it."""
        self._read_blob = read_blob
        self._cache: OrderedDict[str, dict[str, str]] = OrderedDict()

    def learn(self, name: str, data: str | bytes) -> None:
        """Remember an environment that was seen on its way to the keeper; what is no environment is a secret."""
        environment = _parse(data)
        if environment is not None:
            self._cache[name] = environment
            self._cache.move_to_end(name)
            while len(self._cache) > _MOST_CACHED:
                self._cache.popitem(last=False)

    def forget(self, name: str) -> None:
        """No run needs it any more."""
        self._cache.pop(name, None)

    def get(self, name: str) -> dict[str, str] | None:
        """The environment of that name; None when it has to be asked for."""
        if not name:
            return {}
        if name not in self._cache:
            data = self._read_blob(name)
            if data is not None:
                self.learn(name, data)
        return self._cache.get(name)

    def missing(self, frame: Mapping[str, Any]) -> str:
        """The environment that must be learned before the order can be completed; empty: none."""
        for order in _attempts(frame):
            name = str(order.get("env_blob") or "")
            if self.get(name) is None:
                return name
        return ""

    def complete(self, frame: dict[str, Any]) -> dict[str, Any]:
        """The spawn order with this host's variables, and with its warm parent's environment filled in."""
        batch = dict(frame["batch"])
        batch["attempts"] = [self._with_host_variables(order) for order in _attempts(frame)]
        if batch.get("zygote") and batch["attempts"]:
            order = batch["attempts"][0]
            inherited = self.get(str(order.get("env_blob") or "")) or {}
            environment = {**load_time(inherited), **own_load_time(order.get("env") or {})}
            batch["zygote"] = {**batch["zygote"], "env": environment}
        return {**frame, "batch": batch}

    def whole(self, env_blob: str, own: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process, as far as the agent knows it."""
        return {**(self.get(env_blob) or {}), **own}

    def _with_host_variables(self, order: dict[str, Any]) -> dict[str, Any]:
        own = order.get("env") or {}
        added = isa.environment(self.whole(str(order.get("env_blob") or ""), own))
        return {**order, "env": {**added, **own}}


def _attempts(frame: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(frame["batch"].get("attempts") or [])


def _parse(data: str | bytes) -> dict[str, str] | None:
    try:
        content = json.loads(data)
    except ValueError:
        return None
    if not isinstance(content, dict):
        return None
    return {str(name): str(value) for name, value in content.items()}
