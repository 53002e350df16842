import asyncio
import functools
import os
import signal
import sqlite3
import subprocess
import sys

import pytest

from argosy.config.spec import RoleSpec, RunSpec
from argosy.control.eventlog import EventLog
from argosy.errors import HomeError
from argosy.protocol.facts import (
    AttemptStarted,
    CommandAccepted,
    CommandDone,
    Event,
    Note,
    RunsForgotten,
    RunSubmitted,
)


def in_loop(test):
    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 30))

    return run


def note(seq, source=None):
    return Event(seq=seq, at=seq / 2, fact=Note(text=f"n{seq}"), source=source)


def started(seq, run):
    fact = AttemptStarted(attempt=f"{run}-a", run=run, pid=seq, how="exec")
    return Event(seq=seq, at=1.0, fact=fact, source=("k", seq))


@in_loop
async def test_what_was_appended_is_there_after_reopening(tmp_path):
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    events = [note(1), started(2, "r1"), note(3)]
    await log.append(events)
    log.close()
    again = EventLog(path)
    assert list(again.replay()) == events
    assert again.last_seq == 3
    assert await again.read() == events
    again.close()


@in_loop
async def test_appends_that_wait_are_committed_together_and_in_order(tmp_path):
    log = EventLog(str(tmp_path / "events.sqlite"))
    done = []
    futures = [log.append([note(seq)]) for seq in range(1, 501)]
    for seq, future in enumerate(futures, 1):
        future.add_done_callback(lambda _, seq=seq: done.append(seq))
    await asyncio.gather(*futures)
    await asyncio.sleep(0)
    assert done == list(range(1, 501))
    assert log.statistics()["num_commits"] < 250
    assert log.num_pending == 0
    log.close()


@in_loop
async def test_reading_selects_by_number_run_and_limit(tmp_path):
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    await log.append([started(seq, f"r{seq % 2}") for seq in range(1, 11)])

    async def check(log):
        assert [event.seq for event in await log.read(after=3, limit=4)] == [4, 5, 6, 7]
        assert [event.seq for event in await log.read(after=3, run="r0")] == [4, 6, 8, 10]
        assert [event.seq for event in await log.read(after=3, run="r0", limit=1)] == [4]
        assert await log.read(after=10) == []
        assert await log.read(run="r9") == []

    await check(log)
    log.close()
    from_disk = EventLog(path)
    await check(from_disk)
    from_disk.close()


@in_loop
async def test_waiting_ends_when_something_newer_is_durable(tmp_path):
    log = EventLog(str(tmp_path / "events.sqlite"))
    await log.wait_beyond(-1)
    waiting = asyncio.create_task(log.wait_beyond(1))
    await log.append([note(1)])
    assert not waiting.done()
    await log.append([note(2)])
    await waiting
    log.close()


@in_loop
async def test_one_event_of_a_keeper_is_never_logged_twice(tmp_path):
    log = EventLog(str(tmp_path / "events.sqlite"))
    await log.append([note(1, ("k", 7)), note(2, ("other", 7))])
    with pytest.raises(sqlite3.IntegrityError):
        await log.append([note(3), note(4, ("k", 7))])
    assert [event.seq for event in log.replay()] == [1, 2]
    log.close()


@in_loop
@pytest.mark.parametrize("bad", [note(2, ("k", 7)), Event(seq=2, at=0.0, fact=Note(text="\ud800"))])
async def test_nothing_follows_an_event_that_was_refused(tmp_path, bad):
    log = EventLog(str(tmp_path / "events.sqlite"))
    await log.append([note(1, ("k", 7))])
    refused = [log.append([bad]), log.append([note(3)])]
    results = await asyncio.gather(*refused, log.append([note(4)]), return_exceptions=True)
    assert all(isinstance(result, Exception) for result in results)
    assert [event.seq for event in log.replay()] == [1]
    assert log.num_pending == 0
    log.close()
    again = EventLog(str(tmp_path / "events.sqlite"))
    await again.append([note(2)])
    assert [event.seq for event in again.replay()] == [1, 2]
    again.close()


@in_loop
async def test_a_full_disk_holds_events_back_until_there_is_space(tmp_path):
    troubles = []
    log = EventLog(str(tmp_path / "events.sqlite"), on_trouble=troubles.append)
    pages = log._writer.execute("pragma page_count").fetchone()[0]
    log._writer.execute(f"pragma max_page_count = {pages}")
    batch = [Event(seq=seq, at=0.0, fact=Note(text="x" * 1000)) for seq in range(1, 101)]
    future = log.append(batch)
    while not troubles:
        await asyncio.sleep(0.01)
    assert "full" in troubles[0]
    assert log.trouble == troubles[0]
    assert not future.done()
    assert log.last_seq == 0
    assert await log.read() == []
    log._writer.execute("pragma max_page_count = 1000000")
    await future
    assert troubles[1:] == [""]
    assert list(log.replay()) == batch
    log.close()


@in_loop
async def test_a_log_of_another_version_is_refused(tmp_path):
    path = str(tmp_path / "events.sqlite")
    connection = sqlite3.connect(path)
    connection.execute("pragma user_version = 77")
    connection.close()
    with pytest.raises(HomeError, match="version 77"):
        EventLog(path)


@in_loop
async def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path):
    path = tmp_path / "events.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(HomeError, match="cannot be read") as caught:
        EventLog(str(path))
    assert "mv " in caught.value.fix
    assert path.read_bytes().startswith(b"not a database")


@in_loop
async def test_a_damaged_file_is_refused_and_kept(tmp_path):
    path = tmp_path / "events.sqlite"
    log = EventLog(str(path))
    await log.append([note(seq) for seq in range(1, 501)])
    log.close()
    whole = path.read_bytes()
    # The first page says where everything is, and is whole; then nothing of it is; then only some of the events are not.
    for first, last in ((4096, len(whole)), (len(whole) // 2, len(whole) // 2 + 8192)):
        path.write_bytes(whole[:first] + b"x" * (last - first) + whole[last:])
        with pytest.raises(HomeError, match="cannot be read") as caught:
            list(EventLog(str(path)).replay())
        assert "mv " in caught.value.fix


@in_loop
async def test_history_older_than_memory_is_read_from_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.control.eventlog._RECENT_EVENTS", 10)
    log = EventLog(str(tmp_path / "events.sqlite"))
    await log.append([note(seq) for seq in range(1, 31)])
    assert [event.seq for event in await log.read(after=0, limit=100)] == list(range(1, 31))
    assert [event.seq for event in await log.read(after=20, limit=100)] == list(range(21, 31))
    log.close()


def test_the_write_ahead_file_is_merged_when_it_is_quiet(tmp_path):
    path = tmp_path / "events.sqlite"

    async def write():
        log = EventLog(str(path))
        before = path.stat().st_size
        await log.append([note(number) for number in range(1, 2001)])
        async with asyncio.timeout(20):
            while path.stat().st_size <= before:
                await asyncio.sleep(0.02)
        log.close()

    asyncio.run(write())


def submitted(seq, run):
    spec = RunSpec(name=run, roles={"a": RoleSpec(command=["x"])})
    return Event(seq=seq, at=1.0, fact=RunSubmitted(run=run, name=run, spec=spec, env_blob=""))


def rows_of(path):
    connection = sqlite3.connect(path)
    try:
        return connection.execute("select seq, run from events order by seq").fetchall()
    finally:
        connection.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


FORGETTING = [
    note(1),
    submitted(2, "r1"),
    Event(seq=3, at=1.0, fact=CommandAccepted(command="c3", verb="stop", target="r1", about="r1")),
    started(4, "r1"),
    submitted(5, "r2"),
    started(6, "r2"),
    Event(seq=7, at=1.0, fact=CommandDone(command="c3", outcome="ok", about="r1")),
    Event(seq=8, at=1.0, fact=RunsForgotten(runs=["r1"], cursors={"k": 6})),
    note(9),
]
KEPT = [1, 5, 6, 8, 9]


@in_loop
async def test_events_of_forgotten_runs_are_deleted_when_it_is_quiet(tmp_path):
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    await log.append(FORGETTING)
    await until(lambda: [seq for seq, _run in rows_of(path)] == KEPT)
    assert [event.seq for event in log.replay()] == KEPT
    assert log.last_seq == 9
    # Readers that come from before the gap go on behind it; numbers above have none.
    assert [event.seq for event in await log.read(after=7)] == [8, 9]
    await log.append([note(10)])
    log.close()
    again = EventLog(path)
    assert (again.mark, again.last_seq) == (8, 10)
    assert [event.seq for event in await again.read(after=0)] == [*KEPT, 10]
    assert [event.seq for event in await again.read(after=2, limit=2)] == [5, 6]
    assert [event.seq for event in await again.read(after=3, run="r2")] == [5, 6]
    assert await again.read(run="r1") == []
    again.close()


@in_loop
async def test_a_later_forgetting_takes_the_place_of_the_one_before(tmp_path):
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    await log.append(FORGETTING)
    await log.append([Event(seq=10, at=1.0, fact=RunsForgotten(runs=["r2"], cursors={"k": 6}))])
    assert [event.seq for event in log.replay()] == [1, 9, 10]
    await until(lambda: [seq for seq, _run in rows_of(path)] == [1, 9, 10])
    log.close()
    again = EventLog(path)
    assert again.mark == 10
    again.close()


@in_loop
async def test_commands_do_not_appear_in_the_story_of_their_run(tmp_path):
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    await log.append(FORGETTING[:7])
    assert [event.seq for event in await log.read(run="r1")] == [2, 4]
    log.close()
    again = EventLog(path)
    assert [event.seq for event in await again.read(run="r1")] == [2, 4]
    again.close()


KILLED = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv[4])
import argosy.control.eventlog as eventlog
from argosy.control import pruning
import test_eventlog as events

piece, when = int(sys.argv[2]), int(sys.argv[3])
eventlog._PIECE_ROWS = piece
eventlog._QUIET_SECONDS = 0.01
count = 0
delete = pruning.delete_some

def counted(connection, limit):
    global count
    if count == when:
        os.kill(os.getpid(), signal.SIGKILL)  # in the middle of a transaction, or before the first
    count += 1
    return delete(connection, limit)

pruning.delete_some = counted

async def main():
    log = eventlog.EventLog(sys.argv[1])
    await log.append(events.FORGETTING)
    print("durable", flush=True)
    await asyncio.sleep(30)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_a_kill_between_forgetting_and_deletion_loses_nothing(tmp_path, when):
    path = str(tmp_path / "events.sqlite")
    arguments = [sys.executable, "-c", KILLED, path, "1", str(when), os.path.dirname(__file__)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "durable\n"), done.stderr
    left = [seq for seq, _run in rows_of(path)]
    assert len(left) == len(FORGETTING) - when

    async def finish():
        log = EventLog(path)
        assert log.mark == 8
        assert [event.seq for event in log.replay()] == KEPT
        await log.append([note(10)])
        await until(lambda: [seq for seq, _run in rows_of(path)] == [*KEPT, 10])
        log.close()

    asyncio.run(finish())


@in_loop
async def test_under_constant_load_deletion_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.control.eventlog._MOST_DOOMED", 0)
    monkeypatch.setattr("argosy.control.eventlog._QUIET_SECONDS", 3600.0)
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    await log.append(FORGETTING)
    await log.append([note(10)])
    await log.append([note(11)])
    assert [seq for seq, _run in rows_of(path)] == [*KEPT, 10, 11]
    log.close()


@in_loop
async def test_the_space_of_deleted_events_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.control.eventlog._QUIET_SECONDS", 0.01)
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    seq, pages = 0, []
    for round in range(6):
        run = f"r{round}"
        fact = [Note(run=run, text="x" * 1000)] * 500
        batch = [Event(seq=seq + i, at=1.0, fact=each) for i, each in enumerate(fact, 1)]
        seq += len(batch) + 1
        await log.append([*batch, Event(seq=seq, at=1.0, fact=RunsForgotten(runs=[run]))])
        await until(lambda: len(rows_of(path)) == 1)
        pages.append(log._reader.execute("pragma page_count").fetchone()[0])
    assert pages[-1] <= pages[1]
    log.close()


@in_loop
async def test_an_event_that_cannot_be_read_is_a_note_in_its_place(tmp_path):
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    await log.append([note(1), started(2, "r1"), note(3)])
    connection = sqlite3.connect(path)
    connection.execute("update events set fact = ? where seq = 2", (b'{"kind":"of.the.future"}',))
    connection.commit()
    connection.close()
    log.close()
    again = EventLog(path)
    for events in (list(again.replay()), await again.read()):
        assert [event.seq for event in events] == [1, 2, 3]
        assert isinstance(events[1].fact, Note)
        assert (events[1].fact.run, events[1].source) == ("r1", ("k", 2))
        assert "of.the.future" in events[1].fact.text
    again.close()


@in_loop
async def test_a_log_of_the_first_version_is_opened_and_kept(tmp_path):
    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    await log.append(FORGETTING[:7])
    log.close()
    connection = sqlite3.connect(path)
    connection.executescript("drop table doomed; drop table retention; pragma user_version = 1;")
    connection.close()
    old = EventLog(path)
    assert list(old.replay()) == FORGETTING[:7]
    assert old.mark == 0
    await old.append(FORGETTING[7:])
    await until(lambda: [seq for seq, _run in rows_of(path)] == KEPT)
    old.close()


@in_loop
async def test_a_deletion_that_fails_is_tried_again_and_never_ends_the_writer(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("argosy.control.eventlog._QUIET_SECONDS", 0.01)
    path = str(tmp_path / "events.sqlite")
    num_failed = 0

    def fail(connection, limit):
        nonlocal num_failed
        num_failed += 1
        raise sqlite3.DatabaseError("database disk image is malformed")

    with monkeypatch.context() as patch:
        patch.setattr("argosy.control.pruning.delete_some", fail)
        log = EventLog(path)
        await log.append(FORGETTING)
        await until(lambda: num_failed > 1)
        await asyncio.wait_for(log.append([note(10)]), 5)
    await until(lambda: [seq for seq, _run in rows_of(path)] == [*KEPT, 10])
    log.close()


@in_loop
async def test_a_disk_that_stumbles_over_a_forgetting_is_asked_again(tmp_path, monkeypatch):
    from argosy.control import pruning

    path = str(tmp_path / "events.sqlite")
    log = EventLog(path)
    count = pruning.num_doomed

    def stumble(connection):
        monkeypatch.setattr(pruning, "num_doomed", count)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    monkeypatch.setattr(pruning, "num_doomed", stumble)
    await log.append(FORGETTING)
    assert [event.seq for event in log.replay()] == KEPT
    await log.append([note(10)])
    log.close()
