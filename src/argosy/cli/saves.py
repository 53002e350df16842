"""Saves: what a run that has ended left on disk, and how to go on with it.

Used by `argosy stop`, `kill`, `why` and the end of `argosy run`. The controller is told of the saves at a run's end alone, so the run's
directory is looked at for those that its trainer has made on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.analyze.attempts import read_attempts
from argosy.analyze.resuming import how_to_go_on, resume_command

_LOST = "nothing was saved"
_FOLDER = "checkpoints"


class Save:
    """The newest checkpoint of a run."""

    __slots__ = ("command", "go_on", "path", "step")

    def __init__(self, step: int, path: str, role: str, facts: dict[str, dict[str, Any]]) -> None:
        self.step = step
        self.path = path
        directory, submitted = path.rsplit("/", 2)[0], facts.get("run.submitted", {})
        size = facts.get("gang.resized", {}).get("size")
        self.command = resume_command(submitted, role, directory, size=size)
        self.go_on = how_to_go_on(submitted, role, directory, size=size)

    def lines(self) -> list[str]:
        """For a person."""
        return [f"step {self.step} is saved in {self.path}", f"  go on: {self.go_on}"]

    def as_json(self) -> dict[str, Any]:
        """For a program; `command` is null when only a spec says how to start it."""
        return {"step": self.step, "path": self.path, "command": self.command}


def newest_save(view: dict[str, Any], events: list[dict[str, Any]]) -> Save | None:
    """The newest that the run told of or that lies in its directory; None for one that has no trainer, or saved nothing."""
    facts = {event["fact"]["kind"]: event["fact"] for event in events}
    told = facts.get("run.saved", {})
    found: list[tuple[int, str, str]] = []
    attempt = read_attempts(events).by_id.get(told.get("attempt", ""))
    if attempt is not None and told.get("path"):
        found.append((told["step"], told["path"], attempt.role))
    if "gang.bounded" in facts:
        found += _on_disk(Path(view["directory"]) / _FOLDER, facts["gang.bounded"]["role"])
    return Save(*max(found), facts) if found else None


def _on_disk(store: Path, role: str) -> list[tuple[int, str, str]]:
    from argosy.checkpoint import names
    from argosy.checkpoint.listings import Listing

    try:
        steps = Listing(store).steps()
    except OSError:
        return []  # the run has ended all the same
    return [(step, str(store / names.step_name(step)), role) for step in steps]


def loss_of(view: dict[str, Any]) -> str:
    """What its end says was not saved; empty: nothing that is known of."""
    reason = str(view.get("reason") or "")
    return reason[reason.index(_LOST) :] if _LOST in reason else ""
