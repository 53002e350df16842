"""Live streams of the HTTP API: events, lines of output, and both for `argosy run`, as server-sent events.

Each stream pulls at its client's pace from the log and from the run's files, so a slow client costs nobody anything. They look and
never steer; that a tied run ends with its client is `TiedRuns`, below.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec

from argosy.control.eventlog import EventLog
from argosy.control.tally import Ranks
from argosy.telemetry.inotify import CREATE, MODIFY, Inotify
from argosy.telemetry.logs import Line, LogReader
from argosy.telemetry.rundir import logs_directory

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
TIED_SECONDS = 2.0
"""How long the client of a tied run may be gone before the run is stopped."""
_PARTIAL_SECONDS = 0.3
_GATHER_SECONDS = 0.01
_POLL_SECONDS = 0.2
_BATCH = 1000
_MOST_FILES_IN_ID = 128


class Place(msgspec.Struct):
    """How far a client has come in a run's stream: what its Last-Event-ID says."""

    seq: int = 0
    ends: dict[str, int] = {}
    """File name -> offset after the last line sent."""
    skip: dict[str, int] = {}
    """What the client had before it came back; forgotten per file with its first new line."""

    @classmethod
    def parse(cls, text: str) -> Place:
        """From an id; what is no id of ours counts as the beginning."""
        first, *rest = text.split(" ")
        place = cls(seq=int(first) if first.isdecimal() and len(first) < 19 else 0)
        for word in rest:
            name, _, end = word.rpartition(":")
            if end.isdecimal():
                place.ends[name] = place.skip[name] = int(end)
        return place

    def take(self, lines: list[Line]) -> list[Line]:
        """Those of the lines that are new, and note them."""
        fresh = []
        for line in lines:
            name = f"{line.role}.{line.index}.{line.number}.{line.stream}"
            if line.end > self.skip.get(name, 0):
                seen = self.skip.pop(name, 0)
                if seen and line.dropped:
                    # Counted from the file's beginning, of which the client had a part.
                    line = msgspec.structs.replace(line, dropped=max(0, line.dropped - seen))
                self.ends[name] = line.end
                fresh.append(line)
        return fresh

    def id(self) -> str:
        """As text; of very many files only the events' number, so that a reconnect may show lines again."""
        if len(self.ends) > _MOST_FILES_IN_ID:
            return str(self.seq)
        return " ".join([str(self.seq), *(f"{name}:{end}" for name, end in self.ends.items())])


def server_sent(data: object, *, event: str = "", id: str = "") -> bytes:
    """One server-sent event."""
    head = (f"event: {event}\n" if event else "") + (f"id: {id}\n" if id else "")
    return head.encode() + b"data: " + msgspec.json.encode(data) + b"\n\n"


async def follow_events(log: EventLog, after: int, run: str) -> AsyncIterator[bytes]:
    """Events from a number on, for ever."""
    while True:
        seen = log.last_seq
        events = await log.read(after, run, _BATCH)
        if events:
            yield b"".join(server_sent(event, id=str(event.seq)) for event in events)
            after = events[-1].seq
            continue
        after = max(after, seen)
        try:
            async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                await log.wait_beyond(after)
        except TimeoutError:
            yield KEEP_ALIVE


class LogFollower:
    """The lines of a run as they come; sleeps until the kernel says that a file has changed."""

    def __init__(
        self,
        directory: str,
        ranks: Ranks,
        *,
        role: str | None = None,
        index: int | None = None,
    ) -> None:
        self._reader = LogReader(directory, role=role, index=index)
        self._ranks = ranks
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._history: Iterator[Line] | None = None
        self._logs = logs_directory(directory)
        self._inotify: Inotify | None = None
        self._is_polling = False
        self._seen: dict[str, tuple[int, int]] = {}
        """The files' stamps before they were read last; kept while polling."""

    def open(self) -> None:
        """Begin to watch; `close` ends it."""
        self._changed.set()
        try:
            self._inotify = Inotify()
            self._loop.add_reader(self._inotify.fileno(), self._noticed)
            self._inotify.watch(self._logs, MODIFY | CREATE)
        except OSError:
            # This user watches as much as he may already, or a full disk had no room for the run's directory.
            self.close()
            self._is_polling = True

    def begin(self, tail: int | None) -> None:
        """Start with the whole history, or with the last lines of it; read later, in a thread."""

        def history() -> Iterator[Line]:
            yield from self._reader.lines() if tail is None else self._reader.tail(tail)

        self._history = history()

    async def read(self, *, should_flush: bool = False) -> list[Line]:
        """The next lines, in order; empty when there are none now."""
        self._changed.clear()
        lines = await self._loop.run_in_executor(None, self._read, should_flush)
        return [with_rank(line, self._ranks) for line in lines]

    async def take_change(self) -> bool:
        """Whether some file may have more than at the last call, for those who read the files themselves."""
        if not self._is_polling:
            has_changed = self._changed.is_set()
            self._changed.clear()
            return has_changed
        before, self._seen = self._seen, await self._loop.run_in_executor(None, self._stamps)
        return self._seen != before

    async def wait_changed(self) -> None:
        """Return when some file may have more."""
        if not self._is_polling:
            await self._changed.wait()
            return
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if await self._loop.run_in_executor(None, self._stamps) != self._seen:
                return

    @property
    def has_unfinished(self) -> bool:
        """Whether some file ends in a line without its newline."""
        return self._reader.has_unfinished

    def close(self) -> None:
        """End the watch."""
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _read(self, should_flush: bool) -> list[Line]:
        if self._is_polling:
            # Before the reading: what comes in the middle of it is news.
            self._seen = self._stamps()
        if self._history is not None:
            batch = list(itertools.islice(self._history, _BATCH))
            if batch:
                return batch
            self._history = None
        return self._reader.read_new(should_flush=should_flush)

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Size and time of change of every file of output."""
        stamps = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._logs) as entries:
            for entry in entries:
                status = entry.stat()
                stamps[entry.name] = (status.st_size, status.st_mtime_ns)
        return stamps

    def _noticed(self) -> None:
        if self._inotify is not None:
            self._inotify.read()
        self._changed.set()


class RunStream:
    """Lines (and facts) of a run until it has ended, then `event: end` with its view."""

    def __init__(
        self,
        log: EventLog,
        follower: LogFollower,
        run: str,
        *,
        with_facts: bool,
        with_lines: bool = True,
    ) -> None:
        """Without lines there is only word that there is more output, for a client that reads the files."""
        self._log = log
        self._follower = follower
        self._run = run
        self._with_facts = with_facts
        self._with_lines = with_lines

    async def follow(
        self, place: Place, end_of: Callable[[str], int | None], view: Callable[[str], Any]
    ) -> AsyncIterator[bytes]:
        """`end_of` gives the number of the run's last event once it has ended, `view` what is sent last."""
        should_flush = False
        try:
            # Not before: a client that is gone by now leaves no watch behind.
            self._follower.open()
            while True:
                end = end_of(self._run)
                seen = self._log.last_seq
                is_over = end is not None and seen >= end
                pieces = await self._next_pieces(place, should_flush or is_over)
                if pieces:
                    should_flush = False
                    yield b"".join(pieces)
                elif is_over:
                    yield server_sent(view(self._run), event="end")
                    return
                elif await self._wait(seen):
                    should_flush = False
                elif self._follower.has_unfinished:
                    should_flush = True
                else:
                    yield KEEP_ALIVE
        finally:
            self._follower.close()

    async def _next_pieces(self, place: Place, should_flush: bool) -> list[bytes]:
        pieces = []
        if self._with_facts:
            events = await self._log.read(place.seq, self._run, _BATCH)
            pieces = [server_sent(event, event="fact") for event in events]
            place.seq = events[-1].seq if events else place.seq
        if self._with_lines:
            lines = place.take(await self._follower.read(should_flush=should_flush))
            pieces += [server_sent(line, event="line") for line in lines]
        elif await self._follower.take_change():
            pieces.append(server_sent({}, event="output"))
        if pieces:
            # The client remembers the id until the next one: once per batch is enough.
            pieces[-1] = f"id: {place.id()}\n".encode() + pieces[-1]
        return pieces

    async def _wait(self, seen: int) -> bool:
        """Until something may have come; False when nothing has for a while."""
        patience = _PARTIAL_SECONDS if self._follower.has_unfinished else KEEP_ALIVE_SECONDS
        log_grew = self._log.wait_beyond(seen)
        if not await _wait_any(patience, self._follower.wait_changed(), log_grew):
            return False
        await asyncio.sleep(_GATHER_SECONDS)
        return True


async def _wait_any(seconds: float, *awaitables: Awaitable[None]) -> bool:
    """Wait for the first of them; False when the time is over before."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        for task in tasks:
            task.cancel()


def with_rank(line: Line, ranks: Ranks) -> Line:
    """The line with its process's rank, where it has one."""
    rank = ranks.get((line.role, line.index, line.number))
    return line if rank is None else msgspec.structs.replace(line, rank=rank)


class TiedRuns:
    """Runs that end with their client: when nobody has watched one for a while, it is stopped."""

    def __init__(self, stop: Callable[[str], None], is_alive: Callable[[str], bool]) -> None:
        self._stop = stop
        self._is_alive = is_alive
        self._watchers: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def expect(self, run: str, seconds: float) -> None:
        """A client should come and watch within this time."""
        if not self._watchers.get(run) and self._is_alive(run):
            self._cancel(run)
            loop = asyncio.get_running_loop()
            self._timers[run] = loop.call_later(seconds, self._give_up, run)

    @contextlib.contextmanager
    def watched(self, run: str) -> Iterator[None]:
        """A client watches."""
        self._cancel(run)
        self._watchers[run] = self._watchers.get(run, 0) + 1
        try:
            yield
        finally:
            self._watchers[run] -= 1
            if not self._watchers[run]:
                del self._watchers[run]
                self.expect(run, TIED_SECONDS)

    def close(self) -> None:
        """Stop no run any more: the controller ends, the next one expects the clients anew."""
        self._is_alive = lambda run: False
        for run in list(self._timers):
            self._cancel(run)

    def _give_up(self, run: str) -> None:
        self._timers.pop(run, None)
        if self._is_alive(run):
            self._stop(run)

    def _cancel(self, run: str) -> None:
        timer = self._timers.pop(run, None)
        if timer is not None:
            timer.cancel()
