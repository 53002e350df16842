"""Run directories by the words for runs: an id, the beginning of one, or a name.

Used where a command works on what a run has left on disk: the home alone is looked at, so it needs no cluster, and finds runs that the controller
has forgotten and those of earlier boots. Changes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from argosy.control.home import look_at_cluster
from argosy.errors import NotFoundError
from argosy.telemetry.rundir import spec_path


def find_run_directory(word: str) -> Path | None:
    """The directory of the run that is meant; of a name's runs that of the newest. None when there is no such run."""
    found = list(_directories())
    if exact := [path for path in found if path.name == word]:
        return exact[0]
    if named := [path for path in found if _name_of(path) == word]:
        return max(named, key=_submitted_at)
    begun = [path for path in found if path.name.startswith(word)]
    if len(begun) > 1:
        some = ", ".join(path.name for path in begun[:5])
        raise NotFoundError(f"{len(begun)} runs begin with {word!r}", fix=f"say which: {some}")
    return begun[0] if begun else None


def _directories() -> Iterator[Path]:
    clusters = Path(look_at_cluster().home) / "clusters"
    return clusters.glob("*/runs/*/")


def _name_of(directory: Path) -> str:
    try:
        return str(json.loads(Path(spec_path(str(directory))).read_bytes()).get("name", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def _submitted_at(directory: Path) -> float:
    try:
        return os.stat(spec_path(str(directory))).st_mtime
    except OSError:
        return 0.0
