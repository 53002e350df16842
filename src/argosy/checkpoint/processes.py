"""Processes that work for the ranks and outlive them: how they are started, and how their errors come back. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import argosy
from argosy import errors
from argosy.errors import ArgosyError, ClusterError


def environment() -> dict[str, str]:
    """In which a Python of this installation finds the package that runs here."""
    own = str(Path(argosy.__file__).parents[1])
    paths = [own, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start(module: str, *arguments: str, seconds: float) -> str:
    """Run a module that forks what goes on and returns when that is ready; why it could not, for people."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=seconds,
            start_new_session=True,
            cwd="/",
            env=environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        return f": {failure}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    why = lines[-1] if lines else f"exit code {done.returncode}"
    return f": {why}" if done.returncode else ""


def error_named(kind: str, what: str, fix: str) -> ArgosyError:
    """The error that such a process met, as this one raises it; a ClusterError when its name is none of ours."""
    found = getattr(errors, kind, None) if kind else None
    if isinstance(found, type) and issubclass(found, ArgosyError):
        return found(what, fix=fix)
    return ClusterError(what, fix=fix)


def leave_terminal() -> None:
    """What was started reads and writes nothing; for the fork that goes on."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for standard in range(3):
            os.dup2(nothing.fileno(), standard)
