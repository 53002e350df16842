"""Makes the directory of a new run: its folders and spec.json, the fact of its submission: it names variables and secrets but holds no
value of them.

Called by the controller before the run's first message goes out. Never touches what is there already.
"""

from __future__ import annotations

import os

import msgspec

from argosy.protocol.facts import RunSubmitted
from argosy.telemetry.rundir import errors_directory, exec_directory, logs_directory, spec_path


def make_run_directory(directory: str, fact: RunSubmitted) -> None:
    """Folders and spec.json of one run."""
    for path in (logs_directory(directory), errors_directory(directory), exec_directory(directory)):
        os.makedirs(path, mode=0o700, exist_ok=True)
    path = spec_path(directory)
    draft = f"{path}.draft"
    with open(draft, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(fact), indent=2) + b"\n")
    os.replace(draft, path)
