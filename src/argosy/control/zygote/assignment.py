"""What one forked process is to be: read from the keeper's `fork` frame, checked before anything is forked.

The parent makes assignments, the rank carries one out. No side effects here.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

from argosy.control.zygote.libraries import Libraries
from argosy.control.zygote.surroundings import Surroundings


class BatchError(Exception):
    """The frame asks for something that cannot be forked."""


@dataclass
class Assignment:
    """One attempt of a batch and the descriptors that came for it."""

    attempt: str
    keeper: int
    program: dict[str, Any] | None
    """None for the helper that hosts a store."""
    environment: dict[str, str]
    cwd: str
    umask: int
    limits: dict[str, list[int]]
    affinity: list[int]
    nice: int
    threads: int | None
    oom_score_adj: int | None
    is_tty: bool
    error_file: str
    mark: str
    gate: int
    stdout: int
    stderr: int
    surroundings: Surroundings
    secrets: dict[str, int] = field(default_factory=dict)
    listener: int | None = None
    touched_signals: tuple[int, ...] = ()
    """Signals that are not as a fresh interpreter has them: all are set anew."""
    libraries: Libraries = field(default_factory=Libraries)
    parent_gone: int = -1
    """Set after the fork: reads as ended once the intermediate process is gone."""

    def import_directory(self) -> str:
        """Directory that comes first in the program's `sys.path`; empty if none does."""
        if self.program is None or sys.flags.safe_path:
            return ""
        if self.program["kind"] == "module":
            return os.path.realpath(self.cwd)
        path = os.path.realpath(os.path.join(self.cwd, self.program["path"]))
        return path if os.path.isdir(path) else os.path.dirname(path)


def read_batch(
    message: dict[str, Any], descriptors: list[int], surroundings: Surroundings
) -> list[Assignment]:
    """Assignments of a `fork` frame, in its order."""
    remaining = list(descriptors)
    try:
        keeper = int(message["keeper"])
        batch = [_read(item, keeper, remaining, surroundings) for item in message["attempts"]]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BatchError(f"a malformed fork frame: {type(error).__name__}: {error}")
    if remaining:
        raise BatchError(f"{len(remaining)} descriptors too many in a fork frame")
    if not batch:
        raise BatchError("a fork frame without attempts")
    return batch


def _read(
    item: dict[str, Any], keeper: int, remaining: list[int], surroundings: Surroundings
) -> Assignment:
    helper = item.get("helper")
    program = None if helper else dict(item["program"])
    if program is not None and program["kind"] not in ("script", "module"):
        raise BatchError(f"a program of kind {program['kind']!r} is not started by a fork")
    if helper and "torch.distributed" not in sys.modules:
        raise BatchError("a store needs torch.distributed among the preloads")
    mark = str(item.get("mark") or "")
    room = surroundings.memory.mark_room
    if len(os.fsencode(mark)) > room:
        raise BatchError(
            f"the mark needs {len(mark)} bytes, ARGOSY_MARK of the warm parent has {room}"
        )
    gate, stdout, stderr = remaining.pop(0), remaining.pop(0), remaining.pop(0)
    secrets = {str(name): remaining.pop(0) for name in item.get("secret_names") or []}
    return Assignment(
        attempt=str(item["attempt"]),
        keeper=keeper,
        program=program,
        environment=dict(item.get("env") or {}),
        cwd=str(item.get("cwd") or "/"),
        umask=int(item.get("umask", 0o022)),
        limits=dict(item.get("limits") or {}),
        affinity=list(item.get("affinity") or []),
        nice=int(item.get("nice") or 0),
        threads=item.get("threads"),
        oom_score_adj=item.get("oom_score_adj"),
        is_tty=bool(item.get("tty")),
        error_file=str(item.get("error_file") or ""),
        mark=mark,
        gate=gate,
        stdout=stdout,
        stderr=stderr,
        surroundings=surroundings,
        secrets=secrets,
        listener=remaining.pop(0) if helper and helper.get("listen") else None,
    )
