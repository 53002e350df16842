"""The measurements of a run: an aligned line on the terminal and a line of JSON in `metrics.jsonl`.

Every rank hands its values in, one writes them: the lowest rank that lives. Another that has to take its place looks where the
file ends and goes on from there with what it remembers, so that a death leaves neither a gap nor a line twice. Used by `Run.log`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

_REMEMBERED = 64
_TAIL_BYTES = 64 << 10


class Journal:
    """What one process knows of the run's measurements."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._recent: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        """Records that another process was to write."""
        self._descriptor = -1
        self._widths: dict[str, int] = {}
        self._has_complained = False

    def note(self, values: dict[str, Any], *, step: int | None, is_writer: bool) -> None:
        """One record; written if it is this process's turn, else remembered in case that the writer dies."""
        record: dict[str, Any] = {} if step is None else {"step": step}
        record |= {name: _plain(value) for name, value in values.items()}
        record["time"] = time.time()
        if not is_writer:
            self._close()
            self._recent.append(record)
            return
        try:
            due = [record] if self._descriptor >= 0 else self._open(record)
            for each in due:
                self._write(each)
        except OSError as error:
            self._give_up(error)

    def _open(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin to write; of this record and the remembered ones those that the writer before has not written."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        last = _read_last_step(self._descriptor)
        recent, self._recent = list(self._recent), deque(maxlen=_REMEMBERED)
        step = record.get("step")
        if step is None:
            return [record]
        missed = [each for each in recent if last < each.get("step", -1) < step]
        return missed if step == last else [*missed, record]

    def _write(self, record: dict[str, Any]) -> None:
        data = json.dumps({name: _finite(value) for name, value in record.items()}) + "\n"
        # One write to a file opened for appending: whole lines, also beside another writer.
        if os.write(self._descriptor, data.encode()) < len(data.encode()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sys.stdout.write(self._line(record) + "\n")
        sys.stdout.flush()

    def _line(self, record: dict[str, Any]) -> str:
        parts = []
        for name, value in record.items():
            if name != "time":
                text = _show(value)
                width = self._widths[name] = max(self._widths.get(name, 0), len(text))
                parts.append(f"{name} {text:>{width}}")
        return "  ".join(parts)

    def _give_up(self, error: OSError) -> None:
        """A full disk or a reader that went away costs measurements, never the training."""
        self._close()
        if not self._has_complained:
            self._has_complained = True
            with contextlib.suppress(OSError):
                sys.stderr.write(f"argosy: measurements are not written: {error}\n")

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _read_last_step(descriptor: int) -> int:
    """The step of the last whole line, -1 if there is none; mends a line that was cut by a full disk."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    if data and not data.endswith(b"\n"):
        os.write(descriptor, b"\n")
    for line in reversed(data.splitlines()):
        try:
            step = json.loads(line).get("step")
        except (ValueError, AttributeError):
            continue
        if isinstance(step, int):
            return step
    return -1


def _plain(value: Any) -> Any:
    """A number, a text or None of it; a tensor or numpy number of one element is a number."""
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        try:
            value = value.item()
        except (ValueError, RuntimeError):
            return str(value)
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def _finite(value: Any) -> Any:
    """JSON has no word for infinity or for no number."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 100_000 else str(value)
    if value and math.isfinite(value) and abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.5g}"
