"""Farewell: what became of the runs that end with their cluster.

Called by `argosy down --force`. Whom to ask ends with the cluster, so what the controller knows is read before; how each run ended
and what it has saved is in its directory afterwards.
"""

from __future__ import annotations

import json
from typing import Any

from argosy.cli.connection import MOST_LISTED, Controller
from argosy.cli.saves import Save, loss_of, newest_save
from argosy.cli.why import read_events
from argosy.telemetry.rundir import end_path

_MOST_TOLD = 20


class Ended:
    """One run and how it ended."""

    __slots__ = ("saved", "view")

    def __init__(self, view: dict[str, Any], saved: Save | None) -> None:
        self.view = view
        self.saved = saved

    def lines(self) -> list[str]:
        """For a person."""
        name = f" ({self.view['name']})" if self.view["name"] else ""
        told = f"run {self.view['run']}{name} {self.view['outcome'] or 'ended'}"
        lost = loss_of(self.view)
        lines = self.saved.lines() if self.saved else []
        return [f"{told}; {lost}" if lost else told, *lines]

    def as_json(self) -> dict[str, Any]:
        """For a program."""
        kept = {key: self.view[key] for key in ("run", "name", "outcome", "reason")}
        return {**kept, "saved": self.saved.as_json() if self.saved else None}


class Farewell:
    """The runs that are alive before the cluster ends; `ended` is asked when it has."""

    def __init__(self, controller: Controller) -> None:
        alive = controller.get(f"/v1/runs?all=0&limit={MOST_LISTED}")["runs"]
        self._alive: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
            (view, read_events(controller, view["run"]) if _has_gang(view) else [])
            for view in alive
        ]

    def ended(self) -> list[Ended]:
        """How each of them ended, and what it has saved."""
        found = []
        for view, events in self._alive:
            end = read_end(view["directory"])
            told = {**view, "outcome": end.get("outcome", ""), "reason": end.get("reason", "")}
            found.append(Ended(told, newest_save(view, events) if events else None))
        return found


def told(runs: list[Ended]) -> list[str]:
    """For a person; of very many only some."""
    lines = [line for run in runs[:_MOST_TOLD] for line in run.lines()]
    more = len(runs) - _MOST_TOLD
    return [*lines, f"and {more} more runs ended"] if more > 0 else lines


def _has_gang(view: dict[str, Any]) -> bool:
    return any(role["gang"] for role in view["roles"])


def read_end(directory: str) -> dict[str, Any]:
    """How a run ended, by its directory."""
    try:
        with open(end_path(directory), encoding="utf-8") as file:
            fact: dict[str, Any] = json.load(file)["fact"]
            return fact
    except (OSError, ValueError, KeyError):
        return {}  # its directory has been removed: it has ended all the same
