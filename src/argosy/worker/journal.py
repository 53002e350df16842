"""The measurements of a run: an aligned line on the terminal and a line of JSON in `metrics.jsonl`.

Every rank hands its values in, one writes them: the lowest rank that lives. Another that has to take its place looks where the
file ends and goes on from there with what it remembers, so that a death leaves neither a gap nor a line twice. Where steps are made
again, their old lines are moved to `metrics.superseded.jsonl`. Used by `Run`.
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
_TRAINER_STEP = "trainer_step"
"""Of a record that user code has dated itself: where the trainer was, if there was one."""
_UNSHOWN = ("time", _TRAINER_STEP)


class Journal:
    """What one process knows of the run's measurements."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._recent: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED)
        """Records that another process was to write."""
        self._taken_back: list[tuple[int, float]] = []
        """From which step on steps were made again and when that was heard, since another process was to move their lines."""
        self._descriptor = -1
        self._widths: dict[str, int] = {}
        self._has_complained = False

    def note(
        self,
        values: dict[str, Any],
        *,
        step: int | None,
        is_writer: bool,
        given: int | None = None,
    ) -> None:
        """One record of the trainer's step, dated otherwise if `given`; written if it is this process's turn, else remembered in case that the writer dies."""
        dated = step if given is None else given
        record: dict[str, Any] = {} if dated is None else {"step": dated}
        record |= {name: _plain(value) for name, value in values.items()}
        if dated != step:
            record[_TRAINER_STEP] = step
        record["time"] = time.time()
        if not is_writer:
            self._close()
            self._recent.append(record)
            return
        try:
            if self._descriptor < 0:
                self._mend(step)
            due = [record] if self._descriptor >= 0 else self._open(record)
            for each in due:
                self._write(each)
        except OSError as error:
            self._give_up(error)

    def go_back(self, step: int, *, is_writer: bool) -> None:
        """Steps from this one on are made again: what is remembered of them is forgotten, what was written of them leaves the file if it is this process's turn."""
        self._recent = deque(
            (each for each in self._recent if not _is_of(each, step)), maxlen=_REMEMBERED
        )
        if not is_writer:
            self._taken_back.append((step, time.time()))
            return
        try:
            self._move_aside(step)
        except OSError as error:
            self._give_up(error)

    def _move_aside(self, step: int, before: float = math.inf) -> None:
        """Lines of this step and of later ones leave the file, if they were written before a moment."""
        try:
            # In the same file, not beside it: another process may have it open to append to it.
            with self.path.open("r+b") as file:
                first, kept, superseded = _split(file, step, before)
                if not superseded:
                    return
                with self.path.with_name("metrics.superseded.jsonl").open("ab") as aside:
                    aside.writelines(superseded)
                file.seek(first)
                file.writelines(kept)
                file.truncate()
        except FileNotFoundError:
            pass

    def _mend(self, step: int | None) -> None:
        """Move aside what the writer before has left of steps that were taken back: it may have died before it did, and this process may not have heard of it."""
        for first, heard_at in self._taken_back:
            self._move_aside(first, heard_at)
        self._taken_back = []
        if step is not None:
            # Nobody is further than this: the step after it needs every living rank.
            self._move_aside(step + 1)

    def _open(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Begin to write; of this record and the remembered ones those that the writer before has not written."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)
        last = _read_last_step(self._descriptor)
        recent, self._recent = list(self._recent), deque(maxlen=_REMEMBERED)
        step = _order_of(record)
        if step is None:
            return [record]
        places = [_order_of(each) for each in recent]
        # Also of this very step: user code may have more to say of it than this record.
        missed = [
            each
            for each, place in zip(recent, places, strict=True)
            if place is not None and last < place <= step
        ]
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
            if name not in _UNSHOWN:
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


def _split(file: Any, step: int, before: float) -> tuple[int, list[bytes], list[bytes]]:
    """Where the first line of this step or a later one is that was written before a moment; from there on the lines that stay, and those that do not."""
    first, position = -1, 0
    kept: list[bytes] = []
    superseded: list[bytes] = []
    for line in file:
        record = _parse(line)
        # A line that was cut is of whoever wrote it last.
        is_of = bool(superseded) if record is None else _is_of(record, step, before)
        if is_of:
            first = position if first < 0 else first
            superseded.append(line.removesuffix(b"\n") + b"\n")
        elif superseded:
            kept.append(line)
        position += len(line)
    return first, kept, superseded


def _read_last_step(descriptor: int) -> int:
    """The step of the last whole line, -1 if there is none; mends a line that was cut by a full disk."""
    size = os.fstat(descriptor).st_size
    data = os.pread(descriptor, min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    if data and not data.endswith(b"\n"):
        os.write(descriptor, b"\n")
    for line in reversed(data.splitlines()):
        step = _order_of(_parse(line) or {})
        if step is not None:
            return step
    return -1


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _is_of(record: dict[str, Any], step: int, before: float = math.inf) -> bool:
    """Whether the trainer was at this step or a later one, before a moment."""
    place = record.get(_TRAINER_STEP, record.get("step"))
    if not isinstance(place, int) or place < step:
        return False
    written_at = record.get("time")
    return not isinstance(written_at, float) or written_at < before


def _order_of(record: dict[str, Any]) -> int | None:
    """By what a record comes before another: the trainer's step, or where there is no trainer the one that was given."""
    for place in (record.get(_TRAINER_STEP), record.get("step")):
        if isinstance(place, int):
            return place
    return None


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
