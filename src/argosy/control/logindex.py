"""LogIndex: arrival times and size limits of the output files, kept by the agent beside the writers and never in their way.

The kernel says when a file has grown; within 50 ms a record (time, end offset) is appended to its `.index`. A process whose output is
over its limit loses the oldest part: a hole is punched at the head. A disk that fills is reported once per run, until it has space again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable

from argosy.control import space
from argosy.telemetry.inotify import MODIFY, Inotify
from argosy.telemetry.logs import INDEX_RECORD
from argosy.telemetry.rundir import index_path

COALESCE_SECONDS = 0.05
LOW_SPACE_BYTES = 16 << 20
_SPACE_EVERY_SECONDS = 1.0
_RESERVE_BYTES = 64 << 10
_BLOCK_BYTES = 4096
_OPEN_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class _File:
    """One output file being indexed."""

    def __init__(self, path: str, attempt: str, watch: int, dropped: int) -> None:
        self.path = path
        self.attempt = attempt
        self.watch = watch
        self.dropped = dropped
        """How much of the head is gone."""
        # Opened for each record: an agent may watch more files than it may have open.
        self.index = index_path(path)
        os.close(os.open(self.index, _OPEN_FLAGS, 0o600))
        self.size = last_indexed_end(self.index)

    def write(self, size: int) -> None:
        """Say when it had grown to this size."""
        descriptor = os.open(
            self.index, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            os.write(descriptor, INDEX_RECORD.pack(time.time_ns(), size))
        finally:
            os.close(descriptor)
        self.size = size


class _Output:
    """The files of one attempt, and how much of them may be kept."""

    def __init__(self, run: str, log_bytes: int) -> None:
        self.run = run
        self.log_bytes = log_bytes
        self.files: list[_File] = []


class LogIndex:
    """Indexes the output of every attempt it is told to watch."""

    def __init__(self, on_full: Callable[[str, str, str], None]) -> None:
        """`on_full(run, attempt, text)` is called when the disk of a run's output fills."""
        self._on_full = on_full
        self._loop = asyncio.get_running_loop()
        self._inotify = Inotify()
        self._loop.add_reader(self._inotify.fileno(), self._noticed)
        self._outputs: dict[str, _Output] = {}
        self._by_watch: dict[int, _File] = {}
        self._dirty: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._next_write = 0.0
        self._next_space_check = 0.0
        self._space_timer: asyncio.TimerHandle | None = None
        self._warned: set[str] = set()

    def watch(self, attempt: str, run: str, paths: list[str], log_bytes: int) -> None:
        """Begin with an attempt; files that are not there yet are made, so that they can be watched. Again is fine."""
        if attempt in self._outputs:
            return
        output = _Output(run, log_bytes)
        self._outputs[attempt] = output
        for path in dict.fromkeys(paths):
            try:
                self._watch_file(output, attempt, path)
            except OSError as error:
                self._warn(run, attempt, f"the output of {attempt} cannot be indexed: {error}")

    def forget(self, attempt: str) -> None:
        """The attempt has ended: index what came last and stop watching."""
        output = self._outputs.pop(attempt, None)
        if output is None:
            return
        for file in output.files:
            self._inotify.unwatch(file.watch)
            self._by_watch.pop(file.watch, None)
            self._dirty.discard(file.watch)
            self._index(file, output)
        if not any(other.run == output.run for other in self._outputs.values()):
            self._warned.discard(output.run)

    def close(self) -> None:
        """Index what came last, then stop."""
        for attempt in list(self._outputs):
            self.forget(attempt)
        for timer in (self._timer, self._space_timer):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._inotify.fileno())
        self._inotify.close()

    def statistics(self) -> dict[str, int]:
        """How much is watched."""
        return {"num_files": len(self._by_watch)}

    def _watch_file(self, output: _Output, attempt: str, path: str) -> None:
        descriptor = os.open(path, _OPEN_FLAGS, 0o600)
        try:
            self._reserve(output, attempt, descriptor)
            dropped = _first_data(descriptor)
        finally:
            os.close(descriptor)
        number = self._inotify.watch(path, MODIFY)
        file = _File(path, attempt, number, dropped)
        output.files.append(file)
        self._by_watch[number] = file
        # What was written before the watch began.
        self._index(file, output)

    def _reserve(self, output: _Output, attempt: str, descriptor: int) -> None:
        """A little space beyond the end, so that the last words of a process find room on a full disk."""
        size = os.fstat(descriptor).st_size
        try:
            space.reserve(descriptor, size, _RESERVE_BYTES)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._warn(output.run, attempt, f"no space for the output of {attempt}")

    def _noticed(self) -> None:
        changed = self._inotify.read()
        self._dirty |= set(self._by_watch) if changed is None else changed & self._by_watch.keys()
        if not self._dirty or self._timer is not None:
            return
        wait = self._next_write - self._loop.time()
        if wait <= 0:
            self._write()
        else:
            self._timer = self._loop.call_later(wait, self._write)

    def _write(self) -> None:
        # The first change after a pause is indexed at once, those that follow together.
        self._timer = None
        self._next_write = self._loop.time() + COALESCE_SECONDS
        dirty, self._dirty = self._dirty, set()
        for number in dirty:
            file = self._by_watch.get(number)
            if file is not None:
                self._index(file, self._outputs[file.attempt])

    def _index(self, file: _File, output: _Output) -> None:
        try:
            size = os.stat(file.path).st_size
            if size == file.size:
                return
            if size < file.size:
                file.dropped = 0
            file.write(size)
            self._limit(output)
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn(output.run, file.attempt, f"the output of {file.attempt}: {error.strerror}")
        self._look_at_space(file, output)

    def _limit(self, output: _Output) -> None:
        """Drop the oldest output of the largest file when all files together hold too much."""
        kept = sum(file.size - file.dropped for file in output.files)
        # A tenth is dropped beyond need, so that it is not done again with every line.
        excess = kept - output.log_bytes
        if excess <= 0:
            return
        file = max(output.files, key=lambda file: file.size - file.dropped)
        end = min(file.size, file.dropped + excess + output.log_bytes // 10)
        end -= end % _BLOCK_BYTES
        if end <= file.dropped:
            return
        descriptor = os.open(file.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            space.give_back(descriptor, 0, end)
            file.dropped = end
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            text = (
                f"the output of {file.attempt} is over its limit and this disk cannot drop its head"
            )
            self._warn(output.run, file.attempt, text)
        finally:
            os.close(descriptor)

    def _look_at_space(self, file: _File, output: _Output) -> None:
        """Check now, or a little later when it was checked just before: the last writes count, too."""
        wait = self._next_space_check - self._loop.time()
        if wait <= 0:
            self._check_space(file, output)
        elif self._space_timer is None:
            self._space_timer = self._loop.call_later(wait, self._check_space, file, output)

    def _check_space(self, file: _File, output: _Output) -> None:
        self._space_timer = None
        self._next_space_check = self._loop.time() + _SPACE_EVERY_SECONDS
        try:
            space = os.statvfs(os.path.dirname(file.path))
        except FileNotFoundError:
            return
        free = space.f_bavail * space.f_frsize
        if free < LOW_SPACE_BYTES:
            text = f"the disk of the output is nearly full: {free >> 10} KiB left; what does not fit is lost"
            self._warn(output.run, file.attempt, text)
        elif free > 4 * LOW_SPACE_BYTES:
            self._warned.clear()

    def _warn(self, run: str, attempt: str, text: str) -> None:
        if run not in self._warned:
            self._warned.add(run)
            self._on_full(run, attempt, text)


def last_indexed_end(path: str) -> int:
    """The offset in the last whole record of an index; 0 when it is empty."""
    with open(path, "rb", buffering=0) as file:
        descriptor = file.fileno()
        whole = os.fstat(descriptor).st_size // INDEX_RECORD.size
        if not whole:
            return 0
        record = os.pread(descriptor, INDEX_RECORD.size, (whole - 1) * INDEX_RECORD.size)
        return int(INDEX_RECORD.unpack(record)[1])


def _first_data(descriptor: int) -> int:
    """How much of the head was dropped."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:
        return 0
