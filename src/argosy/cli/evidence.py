"""Evidence: what a process left behind when it failed, for the eyes of a person.

Its error or the last lines of its log, the stacks taken when it was suspected, and the files to look into. Called by why.py; it
reads files of the run's directory and never asks the controller.
"""

from __future__ import annotations

import json
import os
from typing import Any

from argosy.analyze.attempts import Attempt, describe_exit, error_lines
from argosy.analyze.causes import CRASHES
from argosy.analyze.stackgroups import is_bootstrap
from argosy.cli.paint import Paint

EVIDENCE_LINES = 12
_TAIL_BYTES = 16 << 10
_NEED_INPUT = ("bdb.BdbQuit", "EOFError: EOF when reading a line")
"""How `breakpoint()` and `input()` end without a terminal."""


def show_evidence(view: dict[str, Any], cause: Attempt, paint: Paint) -> list[str]:
    """Traceback or exec error, else the last lines of its log; and the file."""
    path, tail = log_tail(view["directory"], cause)
    error = error_lines(cause.exit or {})
    shown = error or tail
    lines = [f"    {paint('|', 'dim')} {line}" for line in shown[-EVIDENCE_LINES:]]
    unsaid = [line for line in tail if line not in error] if error else []
    if unsaid:
        lines.append(f"  {paint('last output', 'dim')}:")
        lines += [f"    {paint('|', 'dim')} {line}" for line in unsaid[-4:]]
    lines += _stacks(cause, paint)
    if path:
        lines.append(f"  {paint('log', 'dim')}: {path}")
    if cause.how == "fork" and not shown and (cause.exit or {}).get("signal") in CRASHES:
        lines.append("  fix: `--env PYTHONFAULTHANDLER=1` makes it tell where it crashed")
    if (cause.exit or {}).get("lost") and view.get("outcome") == "failed":
        lines.append(
            "  fix: start it again; what is run with `--restart N` is started again by itself"
        )
    if shown and shown[-1].startswith(_NEED_INPUT):
        lines.append("  fix: stdin is empty; `argosy run --tty` gives one process a terminal")
    return lines


def _stacks(cause: Attempt, paint: Paint) -> list[str]:
    """Where its gang stood when it was suspected, odd ones first."""
    found = read_stacks(cause.evidence)
    if not found:
        return []
    from argosy.analyze.stackgroups import group_stacks
    from argosy.cli.stacks import render_group

    lines = [f"  {paint('stacks when it was suspected', 'dim')}: {cause.evidence}"]
    for group in group_stacks(found):
        block = render_group(group, len(found), paint, show_all=False)
        lines += [f"    {line}" for line in block.splitlines()]
    return lines


def read_stacks(path: str) -> list[dict[str, Any]]:
    """The stacks in a file of evidence; none when there is no such file."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            found: list[dict[str, Any]] = json.load(file)["stacks"]
            return found
    except (OSError, ValueError, KeyError):
        return []


def is_same_error(one: Attempt, other: Attempt) -> bool:
    """Did both end in the same way with the same error?"""
    first, second = one.exit or {}, other.exit or {}
    error = error_lines(first)
    return (
        bool(error)
        and describe_exit(first) == describe_exit(second)
        and error[-1] == (error_lines(second) or [""])[-1]
    )


def log_tail(directory: str, attempt: Attempt) -> tuple[str, list[str]]:
    """The attempt's log file that says most about its end, and its last lines."""
    stem = os.path.join(directory, "logs", f"{attempt.role}.{attempt.index}.{attempt.number}")
    fallback = ""
    for path in (f"{stem}.err", f"{stem}.out"):
        try:
            with open(path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace").strip("\0\n")
        except OSError:
            continue
        fallback = fallback or path
        if text.strip():
            prefix = f"[rank{attempt.rank}]: "
            lines = [line.removeprefix(prefix) for line in readable_lines(text)]
            return path, _crash_lines(lines) or lines[-EVIDENCE_LINES:]
    return fallback, []


def _crash_lines(lines: list[str]) -> list[str]:
    """The dump of Python's fault handler, without the frames below the program: it tells most at its beginning."""
    starts = [n for n, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    if not starts:
        return []
    kept = [
        line
        for line in lines[starts[-1] :]
        if not line.startswith("Extension modules:") and not is_bootstrap(line)
    ]
    return kept[:EVIDENCE_LINES]


def readable_lines(text: str) -> list[str]:
    """Lines as a terminal would show them in the end: overwritten parts and control sequences left out."""
    import re

    plain = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])", "", text)
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in plain.split("\n")]
    return ["".join(c for c in line if c == "\t" or c.isprintable()) for line in lines if line]
