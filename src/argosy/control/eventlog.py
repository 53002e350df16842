"""The event log: SQLite in WAL mode with synchronous=FULL, one writer thread with group commit.

The controller appends and is told when its events are durable; readers use a connection of their own. On a full disk it lives on a reserve,
so that what runs can still be stopped; when that is used up the writer keeps its batch, says so, tries again and goes on by itself. After
an event that it had to refuse it takes no more: numbers are missing only where forgotten runs were (pruning.py). Nothing in it decides.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from argosy.control import pruning, space
from argosy.errors import HomeError
from argosy.protocol.facts import AnyFact, Event, Note, RunsForgotten

SCHEMA_VERSION = 2
_SCHEMA = """
create table events (
    seq integer primary key, at real not null, run text not null, keeper text, number integer, fact blob not null
);
create unique index events_by_source on events (keeper, number) where keeper is not null;
create index events_by_run on events (run, seq) where run != '';
"""
_INSERT = "insert into events (seq, at, run, keeper, number, fact) values (?, ?, ?, ?, ?, ?)"
_COLUMNS = "seq, at, run, keeper, number, fact"
_NO_COMMAND = """cast(substr(fact, 1, 17) as text) != '{"kind":"command.'"""
"""Commands lie with the run that they are about, so that they go with it; its story has what came of them."""
_RETRY_SECONDS = 0.25
_QUIET_SECONDS = 0.5
_MOST_UNMERGED_ROWS = 50_000
"""The write-ahead file is merged into the database when nothing is written for a moment, or after so many rows: never
between an event and those who wait for it."""
_PIECE_ROWS = 500
"""Events of forgotten runs that are deleted in one commit; between two of them whoever appends has his turn."""
_MOST_DOOMED = 1000
"""With more forgotten runs than this, deletion does not wait for a quiet moment any more."""
_RECENT_EVENTS = 4096
RESERVE_BYTES = 4 << 20
"""Space that the write-ahead file holds from the beginning: for a few hundred commits on a disk that others have filled."""
# Primary codes of SQLite that a disk gives when it is full or stumbles; all pass by themselves or by freeing space.
_DISK_CODES = frozenset((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY))

_Row = tuple[int, float, str, str | None, int | None, bytes]


class _Batch(msgspec.Struct):
    events: list[Event]
    future: asyncio.Future[None]


class EventLog:
    """The log of one cluster, opened for writing by its controller alone."""

    def __init__(self, path: str, *, on_trouble: Callable[[str], None] = lambda text: None) -> None:
        """`on_trouble` is called in the event loop when the disk refuses, and with "" when it takes events again."""
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._on_trouble = on_trouble
        self._writer = _open(path)
        _reserve(path)
        self._reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._read_thread = concurrent.futures.ThreadPoolExecutor(1, "eventlog-reader")
        self._recent: deque[Event] = deque(maxlen=_RECENT_EVENTS)
        self._waiters: set[asyncio.Future[None]] = set()
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        with _refused(path):
            self.last_seq: int = self._writer.execute(
                "select coalesce(max(seq), 0) from events"
            ).fetchone()[0]
            """Highest durable sequence number."""
            self.mark = pruning.mark_of(self._writer)
            """Numbers are missing only below this one."""
            self._num_doomed = pruning.num_doomed(self._writer)
            """The writer's own; runs whose events are to be deleted."""
        self.num_pending = 0
        """Appends that are not yet durable."""
        self.trouble = ""
        """What the disk said when it last refused; empty when all is well."""
        self._num_appended = 0
        self._num_commits = 0
        self._thread = threading.Thread(
            target=self._write_loop, name="eventlog-writer", daemon=True
        )
        self._thread.start()

    def append(self, events: Sequence[Event]) -> asyncio.Future[None]:
        """Queue events, in order; the future is done when they and all before them are durable."""
        future: asyncio.Future[None] = self._loop.create_future()
        self.num_pending += 1
        self._queue.put(_Batch(list(events), future))
        return future

    def replay(self) -> Iterator[Event]:
        """Every durable event in order; for the start, before anything is appended. HomeError when the file is damaged."""
        decoder = msgspec.json.Decoder(AnyFact)
        with _refused(self._path):
            cursor = self._reader.execute(
                f"select {_COLUMNS} from events where {pruning.KEPT} order by seq"
            )
            for row in cursor:
                yield _event(row, decoder)

    async def read(self, after: int = 0, run: str = "", limit: int = 1000) -> list[Event]:
        """Durable events with a higher number than `after`, oldest first."""
        if after >= self.last_seq or limit <= 0:
            return []
        recent = self._recent
        if recent and recent[0].seq <= after + 1:
            # What was appended here has no gaps, so the place of the first is known.
            newer = itertools.islice(recent, after + 1 - recent[0].seq, None)
            wanted = (event for event in newer if not run or run_of(event) == run)
            return list(itertools.islice(wanted, limit))
        return await self._loop.run_in_executor(self._read_thread, self._select, after, run, limit)

    async def wait_beyond(self, seq: int) -> None:
        """Return when there is a durable event with a higher number."""
        while self.last_seq <= seq:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def close(self) -> None:
        """Write what is queued (unless the disk refuses), then close."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()
        self._read_thread.shutdown(wait=True)
        self._reader.close()

    def statistics(self) -> dict[str, int | str]:
        """Counts, and the trouble with the disk if there is any."""
        return {
            "last_seq": self.last_seq,
            "num_pending": self.num_pending,
            "num_appended": self._num_appended,
            "num_commits": self._num_commits,
            "trouble": self.trouble,
        }

    def _select(self, after: int, run: str, limit: int) -> list[Event]:
        if run:
            query = (
                f"select {_COLUMNS} from events where run = ? and run != '' and seq > ? "
                f"and {_NO_COMMAND} order by seq limit ?"  # run != '': for the partial index
            )
            rows = self._reader.execute(query, (run, after, limit)).fetchall()
        else:
            query = f"select {_COLUMNS} from events where seq > ? order by seq limit ?"
            rows = self._reader.execute(query, (after, limit)).fetchall()
        decoder = msgspec.json.Decoder(AnyFact)
        return [_event(row, decoder) for row in rows]

    # What follows runs in the writer's thread.

    def _write_loop(self) -> None:
        encoder = msgspec.json.Encoder()
        is_open = True
        num_unmerged = 0
        refused: Exception | None = None
        is_pruning = False
        while is_open:
            patience = _QUIET_SECONDS if num_unmerged or self._num_doomed else None
            batches, is_open = self._collect(0.0 if is_pruning else patience)
            is_pruning = False
            if is_open and self._num_doomed and (not batches or self._num_doomed > _MOST_DOOMED):
                deleted = self._prune()
                num_unmerged += deleted
                is_pruning = not batches and deleted > 0
            if (not batches and not is_pruning) or num_unmerged > _MOST_UNMERGED_ROWS:
                self._merge()
                num_unmerged = 0
            if not batches:
                continue
            if refused is not None:
                # Events after one that is missing would make a log that nobody can replay.
                self._call(self._failed, batches, refused)
                continue
            try:
                events = [event for batch in batches for event in batch.events]
                rows = [_row(event, encoder) for event in events]
                forgotten = [event for event in events if isinstance(event.fact, RunsForgotten)]
                written = self._commit_patiently(rows, forgotten)
            except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
                # Not the disk: a doubled event, one that cannot be written down, or a broken file. Whoever appended must not
                # go on as if it were durable.
                refused = error
                self._call(self._failed, batches, error)
                continue
            if not written:
                break
            num_unmerged += len(rows)
            self._call(self._durable, batches)
        self._writer.close()

    def _prune(self) -> int:
        """Delete some events of forgotten runs; what is refused is tried again in the next quiet moment.

        Whatever the database says: that events are left over is no trouble, but a writer that ended would leave everybody waiting.
        """
        try:
            self._writer.execute("begin immediate")
            count = pruning.delete_some(self._writer, _PIECE_ROWS)
            self._writer.execute("commit")
            self._num_doomed = pruning.num_doomed(self._writer)
        except sqlite3.Error:
            if self._writer.in_transaction:
                self._writer.execute("rollback")
            return 0
        return count

    def _merge(self) -> None:
        try:
            self._writer.execute("pragma wal_checkpoint(passive)")
        except sqlite3.Error:
            pass  # a full or busy disk: the log itself is whole, and the next merge takes all. A broken file: the next event says so

    def _collect(self, quiet_seconds: float | None) -> tuple[list[_Batch], bool]:
        """Everything that waits: what queued up during one commit goes into the next together. Nothing: it was quiet for so long."""
        batches: list[_Batch] = []
        try:
            item = self._queue.get(timeout=quiet_seconds)
        except queue.Empty:
            return batches, True
        while item is not None:
            batches.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batches, True
        return batches, False

    def _commit_patiently(self, rows: list[_Row], forgotten: list[Event]) -> bool:
        """Commit; while the disk refuses, keep trying. False: closed meanwhile."""
        trouble = ""
        while True:
            try:
                self._commit(rows, forgotten)
            except sqlite3.OperationalError as error:
                if (error.sqlite_errorcode & 0xFF) not in _DISK_CODES:
                    raise
                if not trouble:
                    trouble = f"the event log cannot be written: {error}"
                    self._call(self._set_trouble, trouble)
                if self._closing.wait(_RETRY_SECONDS):
                    return False
                continue
            if trouble:
                self._call(self._set_trouble, "")
            return True

    def _commit(self, rows: list[_Row], forgotten: list[Event]) -> None:
        if not rows:
            return
        self._writer.execute("begin immediate")
        try:
            self._writer.executemany(_INSERT, rows)
            num_doomed = self._num_doomed
            if forgotten:
                pruning.doom(self._writer, forgotten)
                num_doomed = pruning.num_doomed(self._writer)
            self._writer.execute("commit")
        except sqlite3.Error:
            if self._writer.in_transaction:
                self._writer.execute("rollback")
            raise
        self._num_doomed = num_doomed  # nothing may fail after the commit: it would be tried again

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: nobody is left to be told.
            pass

    # What follows runs in the event loop.

    def _durable(self, batches: list[_Batch]) -> None:
        self._num_commits += 1
        for batch in batches:
            for event in batch.events:
                self._recent.append(event)
                self.last_seq = event.seq
            self._num_appended += len(batch.events)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        for batch in batches:
            self.num_pending -= 1
            if not batch.future.done():
                batch.future.set_result(None)

    def _failed(self, batches: list[_Batch], error: Exception) -> None:
        for batch in batches:
            self.num_pending -= 1
            if not batch.future.done():
                batch.future.set_exception(error)

    def _set_trouble(self, text: str) -> None:
        self.trouble = text
        self._on_trouble(text)


def run_of(event: Event) -> str:
    """The run an event belongs to; empty for the cluster's own."""
    return getattr(event.fact, "run", "")


def _row(event: Event, encoder: msgspec.json.Encoder) -> _Row:
    keeper, number = event.source or (None, None)
    run = run_of(event) or getattr(event.fact, "about", "")
    return (event.seq, event.at, run, keeper, number, encoder.encode(event.fact))


def _event(row: _Row, decoder: msgspec.json.Decoder[AnyFact]) -> Event:
    seq, at, run, keeper, number, data = row
    source = None if keeper is None or number is None else (keeper, number)
    try:
        fact = decoder.decode(data)
    except msgspec.DecodeError as error:
        # Its place is kept. What the run lacks without it is found where its other facts are folded.
        fact = Note(run=run, level="error", text=f"event {seq} of the log cannot be read: {error}")
    return Event(seq=seq, at=at, fact=fact, source=source)


def _open(path: str) -> sqlite3.Connection:
    """The writer's connection; the schema is made on first use and another version's is refused."""
    with _refused(path), contextlib.ExitStack() as undo:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
        undo.callback(connection.close)
        version = connection.execute("pragma user_version").fetchone()[0]
        if version == 0:
            connection.execute("pragma journal_mode = wal")
        if version in (0, 1):  # 1: as 2, before there was retention
            schema = pruning.SCHEMA if version else _SCHEMA + pruning.SCHEMA
            connection.executescript(
                f"begin; {schema} pragma user_version = {SCHEMA_VERSION}; commit;"
            )
        elif version != SCHEMA_VERSION:
            raise HomeError(
                f"the event log {path} has version {version}, this Argosy reads {SCHEMA_VERSION}",
                fix="use the Argosy that made it, or set ARGOSY_HOME to a new directory",
            )
        connection.execute("pragma synchronous = full")
        connection.execute("pragma wal_autocheckpoint = 0")
        undo.pop_all()
    return connection


def _reserve(path: str) -> None:
    """Hold some space in the write-ahead file. A file system that cannot, or is nearly full, does without."""
    with contextlib.suppress(OSError):
        descriptor = os.open(f"{path}-wal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            space.reserve(descriptor, 0, RESERVE_BYTES)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _refused(path: str) -> Iterator[None]:
    """What SQLite says against a file is told as what is wrong with the home."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        fix = (
            "free some space on its disk, then try again"
            if code in _DISK_CODES
            else f"move it away (mv {path} {path}.broken): the cluster then starts with an empty log"
        )
        raise HomeError(f"the event log {path} cannot be read: {error}", fix=fix) from None
