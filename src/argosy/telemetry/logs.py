"""LogReader: the output of a run's processes as lines, merged in the order of their arrival.

Reads the output files and their arrival-time indexes straight from the run's directory, while they are being written or long after.
Heads that were dropped (holes) are skipped, truncated files are read anew, and nothing here ever blocks or slows a writer.
"""

from __future__ import annotations

import heapq
import os
import struct
from collections import deque
from collections.abc import Iterator

import msgspec

from argosy.telemetry.holes import next_data, read_data
from argosy.telemetry.rundir import LogName, index_path, logs_directory, parse_log_name

INDEX_RECORD = struct.Struct("<QQ")
"""(time_ns, end offset): the bytes up to the offset had arrived by then."""
MOST_LINE_BYTES = 64 << 10
"""A longer line is given out in pieces, each marked partial."""
_CHUNK_BYTES = 256 << 10
_TAIL_BLOCK_BYTES = 64 << 10


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of output; `text` has no newline, `partial` says that none had come yet."""

    at: float
    role: str
    index: int
    rank: int | None = None
    number: int
    stream: str
    text: str
    partial: bool = False
    end: int = 0
    """Offset in its file after this line: tells lines apart for whoever comes back to a broken stream."""
    dropped: int = 0
    """Bytes before this line that nobody can read any more: they were over the process's `log_bytes`."""


class LogReader:
    """Reads the lines of a run, or of one role or process of it, each once."""

    def __init__(
        self, directory: str, *, role: str | None = None, index: int | None = None
    ) -> None:
        """`directory` is the run's."""
        self._directory = logs_directory(directory)
        self._role = role
        self._index = index
        self._files: dict[str, _LogFile] = {}

    def lines(self) -> Iterator[Line]:
        """What there is now and was not read yet, lazily, in order; unfinished last lines come as partial ones."""
        self._find_files()
        return heapq.merge(*(file.lines() for file in self._files.values()), key=_arrival)

    def tail(self, num_lines: int) -> list[Line]:
        """The last lines, in order; all before them count as read."""
        self._find_files()
        for file in self._files.values():
            file.skip_to_tail(num_lines)
        return list(deque(self.lines(), maxlen=num_lines))

    def read_new(self, *, should_flush: bool = False) -> list[Line]:
        """What has come since; to be called again while it gives something. Flush: unfinished lines too."""
        self._find_files()
        found = [line for file in self._files.values() for line in file.read(should_flush)]
        found.sort(key=_arrival)
        return found

    @property
    def has_unfinished(self) -> bool:
        """Whether some file ends in a line without its newline."""
        return any(file.has_unfinished for file in self._files.values())

    def _find_files(self) -> None:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            return
        for file_name in sorted(names):
            if file_name in self._files:
                continue
            name = parse_log_name(file_name)
            if name is None or self._role not in (None, name.role):
                continue
            if self._index in (None, name.index):
                self._files[file_name] = _LogFile(os.path.join(self._directory, file_name), name)


class _LogFile:
    """One output file, and how far it was read."""

    def __init__(self, path: str, name: LogName) -> None:
        self._path = path
        self._name = name
        self._times = _ArrivalTimes(index_path(path))
        self._position = 0
        """Everything before was read."""
        self._rest = b""
        """Read, but its newline has not come."""
        self._is_cut = False
        """The position is in the middle of a line whose head was dropped."""
        self._dropped = 0
        """Bytes that were gone before they were read, and of which no line has told yet."""

    @property
    def has_unfinished(self) -> bool:
        return bool(self._rest)

    def lines(self) -> Iterator[Line]:
        while found := self.read(should_flush=False):
            yield from found
        yield from self.read(should_flush=True)

    def read(self, should_flush: bool) -> list[Line]:
        """Lines of the next chunk."""
        found: list[Line] = []
        descriptor = _open(self._path)
        if descriptor < 0:
            return found
        try:
            while not found:
                data = self._read_chunk(descriptor)
                if not data:
                    break
                self._times.load(os.fstat(descriptor).st_mtime)
                found = self._split(data)
        finally:
            os.close(descriptor)
        if should_flush and self._rest and not found:
            found.append(self._line(self._rest, self._position, partial=True))
            self._rest = b""
        return found

    def skip_to_tail(self, num_lines: int) -> None:
        """Go to where the last lines begin, reading backwards."""
        descriptor = _open(self._path)
        if descriptor < 0:
            return
        try:
            size = os.fstat(descriptor).st_size
            first = next_data(descriptor, 0, size)
            position, newlines = size, 0
            while position > first:
                start = max(first, position - _TAIL_BLOCK_BYTES)
                block = os.pread(descriptor, position - start, start)
                # The newline that ends the file does not begin a line.
                end = len(block) - 1 if position == size else len(block)
                while newlines < num_lines and (end := block.rfind(b"\n", 0, end)) >= 0:
                    newlines += 1
                if newlines >= num_lines:
                    self._go_to(start + end + 1)
                    return
                position = start
            self._go_to(first)
            self._is_cut, self._dropped = first > 0, first
        finally:
            os.close(descriptor)

    def _go_to(self, position: int) -> None:
        self._position = max(position, self._position)
        self._rest = b""
        self._is_cut = False

    def _read_chunk(self, descriptor: int) -> bytes:
        if os.fstat(descriptor).st_size < self._position:
            # Truncated by somebody: what is in it now is new.
            self._position, self._rest, self._is_cut = 0, b"", False
            self._times.restart()
        start, data = read_data(descriptor, self._position, _CHUNK_BYTES)
        if start > self._position:
            self._dropped += start - self._position + len(self._rest)
            self._rest, self._is_cut = b"", True
        self._position = start + len(data)
        return data

    def _split(self, data: bytes) -> list[Line]:
        if self._is_cut:
            cut, newline, data = data.partition(b"\n")
            self._dropped += len(cut) + len(newline)
            if not newline:
                return []
            self._is_cut = False
        *whole, rest = (self._rest + data).split(b"\n")
        offset = self._position - len(data) - len(self._rest)
        found = []
        for text in whole:
            while len(text) > MOST_LINE_BYTES:
                offset += MOST_LINE_BYTES
                found.append(self._line(text[:MOST_LINE_BYTES], offset, partial=True))
                text = text[MOST_LINE_BYTES:]
            offset += len(text) + 1
            found.append(self._line(text.removesuffix(b"\r"), offset))
        while len(rest) > MOST_LINE_BYTES:
            offset += MOST_LINE_BYTES
            found.append(self._line(rest[:MOST_LINE_BYTES], offset, partial=True))
            rest = rest[MOST_LINE_BYTES:]
        self._rest = rest
        return found

    def _line(self, text: bytes, end: int, *, partial: bool = False) -> Line:
        dropped, self._dropped = self._dropped, 0
        return Line(
            at=self._times.of(end),
            role=self._name.role,
            index=self._name.index,
            number=self._name.number,
            stream=self._name.stream,
            text=text.decode("utf-8", "replace"),
            partial=partial,
            end=end,
            dropped=dropped,
        )


class _ArrivalTimes:
    """The index of one output file, read along with it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._position = 0
        self._records: deque[tuple[int, float]] = deque()
        self._last_end = 0
        self._latest = 0.0
        self._modified_at = 0.0

    def load(self, modified_at: float) -> None:
        """Take in what was added; `modified_at` serves for what the index does not cover yet."""
        self._modified_at = modified_at
        descriptor = _open(self._path)
        if descriptor < 0:
            return
        try:
            while data := os.pread(descriptor, _CHUNK_BYTES, self._position):
                whole = len(data) - len(data) % INDEX_RECORD.size
                if not whole:
                    return
                self._position += whole
                self._add(data[:whole])
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """The output file was truncated: forget the records of what was in it."""
        while self._records and self._records[0][0] > self._records[-1][0]:
            self._records.popleft()

    def of(self, end: int) -> float:
        """When the bytes up to this offset had arrived; never earlier than what was asked for before."""
        records = self._records
        while records and records[0][0] < end:
            records.popleft()
        at = records[0][1] if records else self._modified_at
        self._latest = max(self._latest, at)
        return self._latest

    def _add(self, data: bytes) -> None:
        for time_ns, end in INDEX_RECORD.iter_unpack(data):
            if end < self._last_end:
                self._records.clear()
            self._last_end = end
            self._records.append((end, time_ns / 1e9))


def _arrival(line: Line) -> float:
    return line.at


def _open(path: str) -> int:
    """A descriptor, or -1 when there is no such file (yet)."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
