"""A task that needs torch, carried out by another process: this one never imports it.

Starts `python -m argosy.checkpoint.tasks`, gives it one request, draws its progress, and raises its error as if it had happened here. Ctrl-C ends both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from argosy.cli.bars import byte_bar
from argosy.errors import ArgosyError

_MODULE = "argosy.checkpoint.tasks"
_LAST_WORDS = 2000


class TaskFailed(ArgosyError):
    """What the other process said went wrong, with its exit code."""

    def __init__(self, what: str, *, fix: str = "", exit_code: int = 70) -> None:
        super().__init__(what, fix=fix)
        self.exit_code = exit_code


def run_task(request: dict[str, Any], title: str) -> dict[str, Any]:
    """The task's result."""
    command = [sys.executable, "-m", _MODULE]
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
            found = _follow(process.stdout, title)
            process.wait()
            complaints.seek(0)
            words = complaints.read().decode(errors="replace").strip()
        except BaseException:
            process.terminate()
            raise
    if "error" in found:
        error = found["error"]
        raise TaskFailed(error["what"], fix=error["fix"], exit_code=error["code"])
    if "result" not in found:
        raise TaskFailed(
            f"{_MODULE} ended with {process.returncode}: {words[-_LAST_WORDS:] or 'it said nothing'}",
            fix="report it with the text above",
        )
    result: dict[str, Any] = found["result"]
    return result


def _follow(lines: Any, title: str) -> dict[str, Any]:
    """Its last word."""
    found: dict[str, Any] = {}
    with byte_bar(title) as advance:
        done = 0
        for line in lines:
            said = json.loads(line)
            if "progress" not in said:
                found = said
            elif advance is not None:
                advance(said["progress"][0] - done)
                done = said["progress"][0]
    return found
