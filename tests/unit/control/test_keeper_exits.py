"""How ends are observed and told, with a real process but without the keeper's program around it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import threading

import pytest

from argosy.control.keeper.attempts import make_attempt
from argosy.control.keeper.containment import Containment
from argosy.control.keeper.exits import Exits
from argosy.control.keeper.frames import Connection, FrameBuffer, encode
from argosy.control.keeper.links import Links
from argosy.control.keeper.loop import READ, Loop
from argosy.control.keeper.outbox import Outbox
from argosy.control.keeper.records import Records
from argosy.control.keeper.requests import Requests
from argosy.control.keeper.starts import Starts
from argosy.control.keeper.state import Before, Keeper
from argosy.control.keeper.stores import Stores
from argosy.control.keeper.zygotes import Zygotes


def order(index, role="train"):
    return {
        "attempt": f"r.{role}.{index}.0",
        "run": "r",
        "role": role,
        "index": index,
        "generation": 1,
        "program": {"kind": "exec", "argv": ["true"]},
        "env": {"RANK": str(index)},
    }


class Parts:
    """A keeper's parts, and what it tells the agent."""

    def __init__(self, directory):
        records = Records(str(directory))
        records.make_directories()
        self.told = []
        self.keeper = Keeper(
            id="k",
            directory=str(directory),
            runtime=str(directory),
            loop=Loop(),
            containment=Containment("scan", "unit"),
            before=Before((256, 256), [0], 0),
            records=records,
            outbox=Outbox("k", records),
        )
        self.keeper.outbox.send = lambda frame: self.told.append(frame["event"])
        self.exits = Exits(self.keeper)
        self.stores = Stores(self.keeper, self.exits.kill)
        self.starts = Starts(self.keeper, self.exits, Zygotes(self.keeper), self.stores)
        self.links = Links(self.keeper, Requests(self.keeper, self.exits, self.starts))
        self.exits.on_ended.append(self.stores.member_ended)

    def enter(self, index, role="train"):
        attempt = make_attempt(order(index, role))
        attempt.state = "running"
        self.keeper.enter(attempt)
        return attempt

    def link(self, attempt):
        """A worker's end of a link of this attempt."""
        ours, theirs = socket.socketpair()
        connection = Connection(
            self.keeper.loop, ours, on_frame=lambda *_: None, on_close=lambda _: None
        )
        self.links.adopt_worker(connection, attempt)
        return theirs


@pytest.fixture
def parts(tmp_path):
    return Parts(tmp_path)


def own_children():
    """Children of this thread, reaped ones not among them."""
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return set(file.read().split())


def read_frames(sock):
    buffer = FrameBuffer(1 << 20)
    sock.setblocking(False)
    frames = []
    try:
        buffer.feed(sock.recv(1 << 20))
    except BlockingIOError:
        return frames
    while (frame := buffer.next()) is not None:
        frames.append(frame)
    return frames


def test_what_a_process_said_last_is_told_before_its_end(parts):
    attempt = parts.enter(0)
    process = subprocess.Popen(["true"])
    attempt.pid, attempt.pidfd = process.pid, os.pidfd_open(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    worker = parts.link(attempt)
    worker.send(encode({"type": "say", "message": {"say": "fail", "reason": "no data"}}))
    # The end is seen before anybody has looked at the link.
    parts.exits.observe(attempt)
    assert [event["event"] for event in parts.told] == ["link", "exited"]
    assert attempt.links == []
    assert parts.keeper.linked == {}
    process.returncode = 0
    worker.close()


@pytest.mark.parametrize(
    ("end", "is_guest", "error"),
    [
        ("1/0", False, "ZeroDivisionError: division by zero"),
        ("1/0", True, ""),
        ("raise SystemExit(3)", False, ""),
    ],
)
def test_the_exception_that_a_command_printed_as_it_ended_is_in_its_exit(
    parts, tmp_path, end, is_guest, error
):
    attempt = parts.enter(0)
    attempt.host = "r.train.1.0" if is_guest else ""
    attempt.order = {**order(0), "stderr": str(tmp_path / "err")}
    with open(attempt.order["stderr"], "w") as file:
        process = subprocess.Popen([sys.executable, "-S", "-c", end], stderr=file)
    attempt.pid, attempt.pidfd = process.pid, os.pidfd_open(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    parts.exits.observe(attempt)
    assert parts.told[-1]["error"].rpartition("\n")[2] == error
    process.returncode = 0


def test_peers_with_a_link_are_told_of_an_end_and_nobody_else(parts):
    members = [parts.enter(index) for index in range(3)]
    other = parts.enter(0, role="eval")
    workers = [parts.link(attempt) for attempt in (*members, other)]
    parts.exits.fail(members[0], "it was never there")
    said = [[frame["attempt"] for frame in read_frames(worker)] for worker in workers[1:]]
    assert said == [["r.train.0.0"], ["r.train.0.0"], []]
    for worker in workers:
        worker.close()


def test_the_end_of_a_large_gang_looks_at_all_of_it_only_a_few_times(parts, monkeypatch):
    members = [parts.enter(index) for index in range(500)]
    store, _ = parts.stores.make("r", "train", 1, None)
    looks = []
    look = Keeper.live_of
    monkeypatch.setattr(Keeper, "live_of", lambda *a: looks.append(a) or look(*a))
    for attempt in members:
        assert store.socket is not None
        parts.exits.fail(attempt, "it was never there")
    assert store.socket is None
    assert len(looks) < 10
    assert parts.keeper.num_unended == {}


def test_a_large_batch_does_not_keep_others_waiting_until_all_of_it_is_started(parts, monkeypatch):
    loop, story = parts.keeper.loop, []
    reader, writer = os.pipe()

    def start(attempt, store, why):
        story.append(attempt.index)
        if attempt.index == 0:
            os.write(writer, b"x")
        if attempt.index == 99:
            loop.soon(loop.stop)

    def read(mask):
        os.read(reader, 1)
        story.append("somebody else")

    loop.watch(reader, READ, read)
    monkeypatch.setattr(parts.starts, "start_by_exec", start)
    attempts = [order(index) for index in range(100)]
    loop.soon(lambda: parts.starts.spawn({"attempts": attempts}, story.append))
    loop.run()
    started = [word for word in story if isinstance(word, int)]
    assert started == list(range(100))
    assert story.index("somebody else") < story.index(20)
    os.close(reader)
    os.close(writer)


def test_a_process_whose_end_could_not_be_noticed_is_ended_and_said_not_to_have_started(
    parts, monkeypatch
):
    started = []

    def refuse(pid):
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    attempt = parts.enter(0)
    attempt.state = "starting"
    attempt.order = {**order(0), "program": {"kind": "exec", "argv": ["sleep", "100"]}}
    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse)
        parts.starts.start_by_exec(attempt, None, "")
    assert "Too many open files" in parts.told[0]["error"]
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], os.WNOHANG)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_warm_parent_that_cannot_be_had_leaves_nothing_behind_and_the_batch_goes_on(
    parts, monkeypatch, tmp_path
):
    answers = []

    def refuse(*arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    def refuse_links(fd, mask, callback):
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            refuse()
        watch(fd, mask, callback)

    children = own_children()
    loop, watch = parts.keeper.loop, parts.keeper.loop.watch
    groups = tmp_path / "groups"
    groups.mkdir()
    parts.keeper.containment = Containment("cgroup2", "unit", root=str(groups))
    spec = {"python": sys.executable, "preload": [], "env": {}}
    before = set(os.listdir("/proc/self/fd"))
    places = [
        (socket, "socketpair", refuse),
        (os, "pipe2", refuse),
        (os, "fork", refuse),
        (os, "pidfd_open", refuse),
        (loop, "watch", refuse),
        (loop, "watch", refuse_links),
    ]
    for module, name, refusal in places:
        zygotes = Zygotes(parts.keeper)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refusal)
            zygotes.request(spec, lambda zygote, why: answers.append((zygote, why)))
        assert own_children() <= children
    why = "the warm parent could not be started: Too many open files"
    assert answers == [(None, why)] * len(places)
    assert list(groups.iterdir()) == []
    # What earlier tests left to the collector may go meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before
