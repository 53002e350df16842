"""What ranks and the writer say: messages of any size, descriptors beside them, an end that is noticed; and the writer's pace."""

import fcntl
import os
import socket
import threading

import pytest

from argosy.checkpoint.layouts import Wanted, plan_image
from argosy.checkpoint.records import Facts, outline_of
from argosy.checkpoint.shares import plan_shares
from argosy.checkpoint.slots import SnapshotSlot
from argosy.checkpoint.votes import Common
from argosy.checkpoint.writer import messages, serving
from argosy.checkpoint.writer.client import WriterLost, error_of
from argosy.checkpoint.writer.messages import Failed, Hello, Job, Memory, Progress, Staged
from argosy.checkpoint.writer.pacing import Pace, Rate
from argosy.errors import ClusterError, HomeError, ProtocolError, TimedOut
from argosy.move.boxes import Box


def job(count):
    wanted = tuple(
        Wanted(name=f"layer.{n}", dtype="float32", shape=(64, 3), kind="model")
        for n in range(count)
    )
    image = plan_image(wanted)
    holders = {one.name: {0: (Box((0, 0), (64, 3)),)} for one in wanted}
    common = Common(
        wanted=wanted,
        meanings=dict.fromkeys(holders),
        holders=holders,
        aliases={"tied": "layer.0"},
        values={"big": 2**100},
    )
    duties = plan_shares(image, holders, [0])[0]
    return Job(
        number=1,
        source=Staged(memory=0, sequence=2, places=[0] * len(duties)),
        duties=duties,
        outline=outline_of(Facts(step=5, attachments={"a": b"\xff"}), image, common),
        store="/somewhere",
        staging=".staging-000000005-x",
        rank=0,
        size=1,
        session="x",
        seconds=1.0,
        threads=2,
        bytes_per_second=0.0,
        deadline_seconds=9.0,
        is_incremental=True,
    )


def test_a_large_job_arrives_as_it_was_sent():
    left, right = socket.socketpair()
    sent = job(3000)
    thread = threading.Thread(target=messages.send, args=(left, sent))
    thread.start()
    received, descriptors = messages.receive_said(right)
    thread.join()
    assert received == sent
    assert b"1267650600228229401496703205376" in received.outline.values
    assert descriptors == []
    left.close()
    assert messages.receive_said(right) is None
    right.close()


def test_descriptors_travel_beside_their_message():
    left, right = socket.socketpair()
    reading, writing = os.pipe()
    messages.send(left, Hello(version=1, pid=2))
    messages.send(left, Memory(number=4), writing)
    os.close(writing)
    assert messages.receive_said(right) == (Hello(version=1, pid=2), [])
    said, (came,) = messages.receive_said(right)
    assert said == Memory(number=4)
    os.write(came, b"x")
    os.close(came)
    assert os.read(reading, 2) == b"x"
    for one in (left, right):
        one.close()
    os.close(reading)


def test_nonsense_is_refused_and_keeps_no_descriptor():
    left, right = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    messages.send(left, Progress(number=1, num_bytes=2), 0)
    with pytest.raises(ProtocolError):
        messages.receive_said(right)
    left.sendall(b"\xff" * 9)
    assert messages.receive_said(right) is None
    assert len(os.listdir("/proc/self/fd")) <= before
    left.close()
    right.close()


def test_errors_of_the_writer_keep_their_class():
    assert isinstance(error_of(Failed(number=1, kind="HomeError", what="w")), HomeError)
    assert isinstance(error_of(Failed(number=1, kind="WriterLost", what="w")), WriterLost)
    assert type(error_of(Failed(number=1, kind="os", what="w", fix="f"))) is ClusterError
    assert type(error_of(Failed(number=1, kind="", what="w"))) is ClusterError


def test_a_rate_is_shared_by_all_who_ask():
    rate = Rate()
    assert rate.delay(100, 0.0, 5.0) == 0.0
    assert rate.delay(100, 50.0, 5.0) == 0.0
    assert rate.delay(100, 50.0, 5.0) == 2.0
    assert rate.delay(100, 50.0, 6.0) == 3.0
    assert rate.delay(100, 50.0, 50.0) == 0.0
    assert rate.delay(100, 50.0, 50.0, most=1.0) == rate.delay(100, 50.0, 50.0) == 2.0


def test_a_job_ends_at_its_deadline_instead_of_waiting_beyond_it():
    pace = Pace(Rate(), 10.0, 5.0, lambda _: None)
    pace(1000)
    with pytest.raises(TimedOut, match="within 5 s"):
        pace(1)


def test_the_lock_of_a_store_is_free_when_the_end_of_a_job_is_heard(tmp_path, monkeypatch):
    ours, theirs = socket.socketpair()
    held = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    were_free = []

    def send(link, answer):
        if isinstance(answer, Failed):
            with open(tmp_path / "lock") as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    were_free.append(True)
                except BlockingIOError:
                    were_free.append(False)

    monkeypatch.setattr(messages, "send", send)
    monkeypatch.setattr(serving.jobs, "carry_out", refuse)
    memory = SnapshotSlot.create(4096)
    with ours, theirs:
        rank = serving._Rank(ours, Rate(), {})
        rank.hear(Memory(number=0), [os.dup(memory.descriptor)])
        rank.hear(job(1), [held])
        rank.finish()
    memory.close()
    assert were_free == [True]


def refuse(*_):
    raise HomeError("nothing can be written", fix="write elsewhere")
