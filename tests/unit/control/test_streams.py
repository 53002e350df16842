import asyncio
import errno
import functools
import os

import pytest

from argosy.control.streams import (
    KEEP_ALIVE,
    LogFollower,
    Place,
    RunStream,
    TiedRuns,
    server_sent,
)
from argosy.telemetry.logs import Line


def in_loop(test):
    @functools.wraps(test)
    def run(*arguments, **named):
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 30))

    return run


def line(end, text="x", index=0):
    return Line(at=1.0, role="a", index=index, number=0, stream="out", text=text, end=end)


def test_a_server_sent_event_has_its_lines():
    assert server_sent({"a": 1}) == b'data: {"a":1}\n\n'
    assert server_sent([], event="end", id="7") == b"event: end\nid: 7\ndata: []\n\n"


def test_a_place_survives_its_id():
    place = Place(seq=12)
    place.take([line(10), line(20), line(5, index=1)])
    again = Place.parse(place.id())
    assert again.seq == 12
    assert again.take([line(10), line(20), line(30), line(5, index=1), line(9, index=1)]) == [
        line(30),
        line(9, index=1),
    ]


def test_what_was_dropped_is_counted_from_where_the_client_had_come():
    def after_a_hole():
        return Line(at=1.0, role="a", index=0, number=0, stream="out", text="x", end=90, dropped=80)

    assert [line.dropped for line in Place().take([after_a_hole()])] == [80]
    again = Place.parse("3 a.0.0.out:20")
    assert [line.dropped for line in again.take([after_a_hole()])] == [60]


def test_after_the_first_new_line_a_truncated_file_is_shown_again():
    place = Place.parse("3 a.0.0.out:20")
    assert place.take([line(20)]) == []
    assert place.take([line(30)]) == [line(30)]
    assert place.take([line(4)]) == [line(4)]


def test_what_is_no_place_is_the_beginning():
    for text in ("", "x", "-4", "9" * 40, "7 a:b c", "\x00", "\xb2", "7 a:\xb2"):
        place = Place.parse(text)
        assert place.seq in (0, 7)
        assert place.take([line(1)]) == [line(1)]


class Fates:
    """Which runs were stopped."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr("argosy.control.streams.TIED_SECONDS", 0.02)
        self.alive = {"r"}
        self.stopped = asyncio.Event()
        self.tied = TiedRuns(lambda run: self.stopped.set(), lambda run: run in self.alive)


@in_loop
async def test_a_run_whose_last_watcher_left_is_stopped(monkeypatch):
    fates = Fates(monkeypatch)
    with fates.tied.watched("r"):
        with fates.tied.watched("r"):
            pass
        await asyncio.sleep(0.05)
        assert not fates.stopped.is_set()
    await fates.stopped.wait()


@in_loop
async def test_a_watcher_who_comes_back_in_time_saves_the_run(monkeypatch):
    fates = Fates(monkeypatch)
    with fates.tied.watched("r"):
        pass
    with fates.tied.watched("r"):
        await asyncio.sleep(0.05)
        assert not fates.stopped.is_set()
        fates.alive.clear()
    await asyncio.sleep(0.05)
    assert not fates.stopped.is_set()


@in_loop
async def test_a_client_that_never_comes_costs_the_run(monkeypatch):
    fates = Fates(monkeypatch)
    fates.tied.expect("r", 0.01)
    await fates.stopped.wait()


@in_loop
async def test_a_controller_that_ends_stops_nothing(monkeypatch):
    fates = Fates(monkeypatch)
    with fates.tied.watched("r"):
        fates.tied.close()
    await asyncio.sleep(0.05)
    assert not fates.stopped.is_set()


def make_logs(directory):
    (directory / "logs").mkdir()
    (directory / "logs" / "a.0.0.out").write_text("one\n")
    return LogFollower(str(directory), {})


@in_loop
async def test_a_stream_that_nobody_reads_leaves_no_watch_behind(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    follower = make_logs(tmp_path)
    stream = RunStream(None, follower, "r", with_facts=False).follow(Place(), lambda run: None, str)
    await stream.aclose()
    assert set(os.listdir("/proc/self/fd")) <= before


@in_loop
async def test_output_is_followed_also_by_a_user_who_may_watch_no_more(tmp_path, monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr("argosy.control.streams.Inotify", refuse)
    monkeypatch.setattr("argosy.control.streams._POLL_SECONDS", 0.01)
    follower = make_logs(tmp_path)
    follower.open()
    follower.begin(None)
    assert [line.text for line in await follower.read()] == ["one"]
    (tmp_path / "logs" / "a.0.0.out").open("a").write("two\n")
    await follower.wait_changed()
    while not (lines := await follower.read()):
        await follower.wait_changed()
    assert [line.text for line in lines] == ["two"]
    follower.close()


@in_loop
async def test_output_is_followed_also_when_its_directory_is_made_later(tmp_path, monkeypatch):
    monkeypatch.setattr("argosy.control.streams._POLL_SECONDS", 0.01)
    follower = LogFollower(str(tmp_path), {})
    follower.open()
    assert await follower.read() == []
    waiting = asyncio.ensure_future(follower.wait_changed())
    make_logs(tmp_path)
    await waiting
    assert [line.text for line in await follower.read()] == ["one"]
    follower.close()


class QuietLog:
    """A log to which nothing is added."""

    last_seq = 0

    async def wait_beyond(self, seq):
        await asyncio.Event().wait()


@pytest.mark.parametrize("may_watch", [True, False])
@in_loop
async def test_who_reads_the_files_is_told_only_that_there_is_more(
    tmp_path, monkeypatch, may_watch
):
    def refuse():
        raise OSError(errno.EMFILE, "too many")

    if not may_watch:
        monkeypatch.setattr("argosy.control.streams.Inotify", refuse)
    monkeypatch.setattr("argosy.control.streams._POLL_SECONDS", 0.01)
    monkeypatch.setattr("argosy.control.streams.KEEP_ALIVE_SECONDS", 0.03)
    stream = RunStream(QuietLog(), make_logs(tmp_path), "r", with_facts=False, with_lines=False)
    pieces = stream.follow(Place(), lambda run: None, lambda run: None)
    notice = server_sent({}, event="output")
    assert (await anext(pieces)).endswith(notice), "what was there before"
    assert await anext(pieces) == KEEP_ALIVE
    (tmp_path / "logs" / "a.0.0.out").open("a").write("two")
    while (piece := await anext(pieces)) == KEEP_ALIVE:
        pass
    assert piece.endswith(notice)
    await pieces.aclose()


@in_loop
async def test_a_line_without_its_newline_is_shown_also_to_a_user_who_may_watch_no_more(
    tmp_path, monkeypatch
):
    def refuse():
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr("argosy.control.streams.Inotify", refuse)
    monkeypatch.setattr("argosy.control.streams._POLL_SECONDS", 0.01)
    monkeypatch.setattr("argosy.control.streams._PARTIAL_SECONDS", 0.03)
    monkeypatch.setattr("argosy.control.streams.KEEP_ALIVE_SECONDS", 0.03)
    follower = make_logs(tmp_path)
    follower.begin(None)
    stream = RunStream(QuietLog(), follower, "r", with_facts=False)
    pieces = stream.follow(Place(), lambda run: None, lambda run: None)
    assert b"one" in await anext(pieces)
    assert await anext(pieces) == KEEP_ALIVE
    (tmp_path / "logs" / "a.0.0.out").open("a").write("password: ")
    while (piece := await anext(pieces)) == KEEP_ALIVE:
        pass
    assert b"password: " in piece
    await pieces.aclose()
