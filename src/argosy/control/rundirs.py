"""Makes the directory of a new run: its folders and spec.json, which names variables and secrets but holds no value of them.

Called by the controller before the run's first message goes out. Never touches what is there already.
"""

from __future__ import annotations

import hashlib
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
        file.write(msgspec.json.format(msgspec.json.encode(describe(fact)), indent=2) + b"\n")
    os.replace(draft, path)


def describe(fact: RunSubmitted) -> dict[str, object]:
    """The run as spec.json shows it: values of variables replaced by digests."""
    description: dict[str, object] = msgspec.to_builtins(fact)
    spec = msgspec.to_builtins(fact.spec)
    for role in spec["roles"].values():
        if "env" in role:
            role["env"] = {name: digest(value) for name, value in role["env"].items()}
    description["spec"] = spec
    return description


def digest(value: str) -> str:
    """Enough to see whether two values are equal, not what they are."""
    return "sha256:" + hashlib.sha256(value.encode()).hexdigest()[:16]
