"""The worker's link over a real socket, with a keeper that the test plays."""

import io
import json
import queue
import socket
import struct
import sys
import threading

import pytest

from argosy.protocol.link import Link

SECONDS = 20.0


class Keeper:
    """Accepts one worker at a time, and says what the test wants."""

    def __init__(self, path):
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(path)
        self.listening.listen()
        self.listening.settimeout(SECONDS)
        self.socket = None

    def accept(self):
        self.socket, _ = self.listening.accept()
        self.socket.settimeout(SECONDS)
        assert self.read()["type"] == "hello"
        self.send(type="welcome")

    def read(self):
        (length,) = struct.unpack(">I", self._read_bytes(4))
        return json.loads(self._read_bytes(length))

    def _read_bytes(self, count):
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            assert part, "the worker has hung up"
            data += part
        return data

    def send(self, **frame):
        body = json.dumps(frame).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def close(self):
        for each in (self.listening, self.socket):
            if each is not None:
                each.close()


@pytest.fixture
def keeper(tmp_path):
    keeper = Keeper(str(tmp_path / "keeper"))
    yield keeper
    keeper.close()


@pytest.fixture
def link(tmp_path, keeper):
    link = Link(str(tmp_path / "keeper"), "r.train.0.0", "token")
    yield link
    link.close()


def test_what_was_read_before_anybody_listened_is_heard(keeper, link):
    link.say({"say": "ready"})
    keeper.accept()
    keeper.send(type="told", message={"number": 1})
    keeper.send(type="told", message={"number": 2})
    # Whoever says something also reads, and nothing more comes on the socket after that.
    link.say({"say": "step", "step": 1})
    assert not link._incoming
    assert len(link._told) == 2
    heard = queue.Queue()
    link.listen(heard.put)
    assert [heard.get(timeout=SECONDS)["message"]["number"] for _ in range(2)] == [1, 2]


def test_a_listener_that_raises_does_not_make_the_process_deaf(keeper, link, capfd):
    heard = queue.Queue()

    def listen(frame):
        heard.put(frame)
        raise RuntimeError("a mistake in a callback")

    link.listen(listen)
    keeper.accept()
    for number in range(3):
        keeper.send(type="told", message={"number": number})
    assert [heard.get(timeout=SECONDS)["message"]["number"] for _ in range(3)] == [0, 1, 2]
    assert "a mistake in a callback" in capfd.readouterr().err


def test_nor_does_it_when_nobody_can_be_told(keeper, link, monkeypatch):
    heard, closed = queue.Queue(), io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)

    def listen(frame):
        heard.put(frame)
        raise RuntimeError("a mistake in a callback")

    link.listen(listen)
    keeper.accept()
    for number in range(3):
        keeper.send(type="told", message={"number": number})
    assert [heard.get(timeout=SECONDS)["message"]["number"] for _ in range(3)] == [0, 1, 2]


def test_a_reply_reaches_who_asked_while_a_listener_is_busy(keeper, link):
    is_busy, go_on = threading.Event(), threading.Event()

    def listen(frame):
        is_busy.set()
        assert go_on.wait(SECONDS)

    link.listen(listen)
    keeper.accept()
    keeper.send(type="told", message={})
    assert is_busy.wait(SECONDS)

    def answer():
        asked = keeper.read()
        keeper.send(type="reply", id=asked["id"], what=asked["type"])

    answering = threading.Thread(target=answer)
    answering.start()
    reply, descriptors = link.ask({"type": "question"}, timeout=SECONDS)
    answering.join(SECONDS)
    go_on.set()
    assert (reply["what"], descriptors) == ("question", [])


def test_what_a_slow_keeper_could_not_take_at_once_is_sent_when_it_reads_again(keeper, link):
    heard = queue.Queue()
    link.listen(heard.put)
    keeper.accept()
    keeper.send(type="told", message={})
    heard.get(timeout=SECONDS)
    # The thread that listens waits for words of the keeper, and none come.
    text = "x" * 4096
    for number in range(200):
        link.say({"say": "step", "step": number, "text": text})
    assert link._outgoing
    assert [keeper.read()["message"]["step"] for _ in range(200)] == list(range(200))
