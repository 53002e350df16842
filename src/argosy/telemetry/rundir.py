"""The layout of a run's directory: which file is where and what its name says; see docs/reference/home.md.

Shared by those who name files (the control plane) and those who read them (logs, reports). Touches no file itself.
"""

from __future__ import annotations

import os

import msgspec

INDEX_SUFFIX = ".index"


class LogName(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """What the name of an output file says."""

    role: str
    index: int
    number: int
    """Which start of the process: 0 for the first."""
    stream: str
    """`out` or `err`; a tty writes `out` alone."""


def spec_path(directory: str) -> str:
    """The run's spec, without values of environment or secrets."""
    return os.path.join(directory, "spec.json")


def end_path(directory: str) -> str:
    """How and when the run ended."""
    return os.path.join(directory, "end.json")


def logs_directory(directory: str) -> str:
    """Where the output files are."""
    return os.path.join(directory, "logs")


def errors_directory(directory: str) -> str:
    """Where the processes' error files are."""
    return os.path.join(directory, "errors")


def stacks_directory(directory: str) -> str:
    """Where the stacks are that were taken before a suspect was killed."""
    return os.path.join(directory, "stacks")


def exec_directory(directory: str) -> str:
    """Where the output of commands started by `exec` is: beside the run's logs, not among them."""
    return os.path.join(directory, "exec")


def log_path(directory: str, name: LogName) -> str:
    """The output file of one attempt."""
    return os.path.join(
        logs_directory(directory), f"{name.role}.{name.index}.{name.number}.{name.stream}"
    )


def index_path(log: str) -> str:
    """The arrival times of an output file."""
    return log + INDEX_SUFFIX


def parse_log_name(file_name: str) -> LogName | None:
    """What an output file's name says; None for any other file."""
    parts = file_name.rsplit(".", 3)
    if len(parts) != 4 or parts[3] not in ("out", "err"):
        return None
    role, index, number, stream = parts
    if not (role and index.isascii() and index.isdigit() and number.isascii() and number.isdigit()):
        return None
    return LogName(role=role, index=int(index), number=int(number), stream=stream)
