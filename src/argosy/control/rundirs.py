"""Makes the directory of a new run: its folders and spec.json, the fact of its submission: it names variables and secrets but holds no
value of them. At the end it adds end.json, how the run ended: that outlives the run's events.

Called by the controller, before the run's first message goes out and after its end is durable. Never touches what is there already.
"""

from __future__ import annotations

import os

import msgspec

from argosy.protocol.facts import Event, RunSubmitted
from argosy.telemetry.rundir import (
    end_path,
    errors_directory,
    exec_directory,
    logs_directory,
    spec_path,
)


def make_run_directory(directory: str, fact: RunSubmitted) -> None:
    """Folders and spec.json of one run."""
    for path in (logs_directory(directory), errors_directory(directory), exec_directory(directory)):
        os.makedirs(path, mode=0o700, exist_ok=True)
    _write(spec_path(directory), fact)


def write_end(directory: str, event: Event) -> None:
    """end.json of one run, if there is none yet; nothing where the directory has been removed."""
    path = end_path(directory)
    if os.path.isdir(directory) and not os.path.exists(path):
        _write(path, event)


def _write(path: str, value: msgspec.Struct) -> None:
    draft = f"{path}.draft"
    with open(draft, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    os.replace(draft, path)
