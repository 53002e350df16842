from __future__ import annotations

import contextlib
import json
import os
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.control.keeper.frames import Connection, FrameBuffer, FrameError, encode
from argosy.control.keeper.loop import Loop

MESSAGES = st.lists(
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=4),
    max_size=6,
)


@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 50), min_size=1, max_size=50))
def test_frames_survive_any_cutting_of_the_stream(messages, cuts):
    data = b"".join(encode(message) for message in messages)
    buffer = FrameBuffer(1 << 20)
    received = []
    turn = 0
    while data:
        size = cuts[turn % len(cuts)]
        turn += 1
        buffer.feed(data[:size])
        data = data[size:]
        while (message := buffer.next()) is not None:
            received.append(message)
    assert received == messages


@given(data=st.binary(min_size=4, max_size=200))
def test_garbage_is_an_error_or_needs_more_and_never_anything_else(data):
    buffer = FrameBuffer(1000)
    buffer.feed(data)
    with contextlib.suppress(FrameError):
        while (message := buffer.next()) is not None:
            assert isinstance(message, dict)


def test_an_oversized_frame_is_refused_before_its_body_arrives():
    buffer = FrameBuffer(10)
    buffer.feed(struct.pack(">I", 11))
    with pytest.raises(FrameError, match="larger than the limit of 10"):
        buffer.next()


class Pair:
    """A connection on a loop that runs only as long as a test wants."""

    def __init__(self, **options):
        self.loop = Loop()
        ours, self.far = socket.socketpair()
        self.frames = []
        self.closed = []
        self.near = Connection(
            self.loop,
            ours,
            on_frame=lambda c, message, fds: self.frames.append((message, fds)),
            on_close=self.closed.append,
            **options,
        )

    def turn(self):
        self.loop.after(0, self.loop.stop)
        self.loop._is_running = True
        for fd, mask in self.loop._epoll.poll(0):
            self.loop._callbacks[fd](mask)


def test_a_peer_that_does_not_read_is_dropped_at_the_limit():
    pair = Pair(most_queued_bytes=100_000)
    for _ in range(10_000):
        pair.near.send({"text": "x" * 1000})
        if pair.closed:
            break
    assert pair.closed == [pair.near]
    pair.far.close()


def test_descriptors_arrive_with_their_frame_even_when_the_peer_is_slow():
    pair = Pair(most_queued_bytes=64 << 20)
    pair.far.setblocking(False)
    read, write = os.pipe()
    pair.near.send({"filler": "x" * 5_000_000})
    pair.near.send({"fds": 1}, [write])
    os.close(write)
    data, fds = b"", []
    while len(fds) < 1 or len(data) < 5_000_000:
        pair.turn()
        try:
            part, ancillary, _, _ = pair.far.recvmsg(1 << 20, 4096)
        except BlockingIOError:
            continue
        data += part
        for _, _, content in ancillary:
            fds += list(memoryview(content).cast("i"))
    os.write(fds[0], b"same")
    assert os.read(read, 4) == b"same"
    for fd in (read, *fds):
        os.close(fd)
    pair.near.close()
    pair.far.close()


@pytest.mark.parametrize("is_reset", [False, True], ids=["hung up", "hung up with words unread"])
def test_what_a_peer_said_before_it_hung_up_is_read_although_nothing_reaches_it_any_more(is_reset):
    pair = Pair()
    if is_reset:
        pair.near.send({"told": 0})
    pair.far.sendall(encode({"said": 1}) + encode({"said": 2}))
    pair.far.close()
    read, write = os.pipe()
    pair.near.send({"told": 1, "fds": 1}, [write])
    pair.near.send({"told": 2})
    assert not pair.closed
    pair.near.drain()
    assert [message for message, _ in pair.frames] == [{"said": 1}, {"said": 2}]
    pair.turn()
    assert pair.closed == [pair.near]
    os.close(write)
    assert os.read(read, 1) == b"", "no copy of a descriptor is left"
    os.close(read)


def test_words_behind_a_request_of_a_peer_that_has_hung_up_are_read():
    pair = Pair()
    pair.near.on_frame = lambda c, message, fds: (pair.frames.append(message), c.send({}))
    pair.far.sendall(encode({"ask": 1}) + encode({"said": 2}))
    pair.far.close()
    pair.turn()
    assert pair.frames == [{"ask": 1}, {"said": 2}]
    pair.turn()
    assert pair.closed == [pair.near]


def test_a_frame_that_names_missing_descriptors_ends_the_connection():
    pair = Pair()
    pair.far.sendall(encode({"fds": 2}))
    pair.turn()
    assert pair.closed
    assert pair.frames == []
    (length,) = struct.unpack(">I", pair.far.recv(4))
    assert json.loads(pair.far.recv(length))["type"] == "error"
    pair.far.close()


def test_a_connection_is_carried_over_with_its_half_read_frame():
    first = Pair()
    data = encode({"a": 1}) + encode({"b": 2})
    first.far.sendall(data[:-3])
    first.turn()
    assert [message for message, _ in first.frames] == [{"a": 1}]
    state = first.near.to_state()
    second = Pair()
    second.near.take_state(state)
    second.far.sendall(data[-3:])
    second.turn()
    assert [message for message, _ in second.frames] == [{"b": 2}]
    for pair in (first, second):
        pair.near.close()
        pair.far.close()
