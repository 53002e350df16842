import errno
import json
import os
import selectors
import socket
import struct

import pytest

from argosy.worker.switchboard import Switchboard


class Client:
    """The other end of a link, in the same thread."""

    def __init__(self, board, path):
        self.board = board
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.settimeout(10)
        self.descriptors = []

    def send_bytes(self, data):
        self.socket.sendall(data)
        self.turn()

    def send(self, **frame):
        body = json.dumps(frame).encode()
        self.send_bytes(struct.pack(">I", len(body)) + body)

    def turn(self):
        while ready := self.board.selector.select(0):
            for key, mask in ready:
                key.data(mask)

    def receive(self):
        """The next frame; None at the end of the stream."""
        data = b""
        while len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]:
            wanted = (
                4 - len(data) if len(data) < 4 else 4 + struct.unpack(">I", data[:4])[0] - len(data)
            )
            part, descriptors, _, _ = socket.recv_fds(self.socket, wanted, 8)
            self.descriptors += descriptors
            if not part:
                return None
            data += part
        return json.loads(data[4:])

    def hello(self, attempt="a", token="t", **more):
        self.send(type="hello", version=1, attempt=attempt, token=token, **{"as": "worker", **more})
        return self.receive()

    def ask(self, **frame):
        self.send(id=1, **frame)
        return self.receive()

    def close(self):
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def said():
    return []


@pytest.fixture
def board(said):
    before = set(os.listdir("/proc/self/fd"))
    selector = selectors.PollSelector()
    made = Switchboard(
        selector,
        lambda attempt, message: said.append((attempt, dict(message))),
        lambda attempt: said.append(attempt),
    )
    made.admit("a", "t")
    made.admit("b", "u")
    yield made
    made.close()
    selector.close()
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def connect(board):
    clients = []

    def make():
        clients.append(Client(board, board.path))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def test_the_socket_has_no_name_on_disk(board):
    assert board.path.startswith("/proc/")
    assert "(deleted)" in os.readlink(board.path)


@pytest.mark.parametrize(
    "wrong",
    [{"attempt": "c"}, {"token": "u"}, {"version": 2}, {"attempt": None}, {"type": "say"}],
)
def test_strangers_are_refused(connect, wrong):
    client = connect()
    client.send(
        **{"type": "hello", "version": 1, "as": "worker", "attempt": "a", "token": "t"} | wrong
    )
    assert client.receive()["type"] == "error"
    assert client.receive() is None


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x03abc", b"\0\0\0\x02[]"])
def test_garbage_ends_that_connection_alone(connect, said, data):
    other, client = connect(), connect()
    assert other.hello("b", "u")["type"] == "welcome"
    client.hello()
    client.send_bytes(data)
    assert client.receive()["type"] == "error"
    assert client.receive() is None
    other.send(type="say", message={"say": "ready"})
    assert said[-1] == ("b", {"say": "ready"})


def test_what_is_said_and_told_reaches_the_right_one(connect, board, said):
    one, other = connect(), connect()
    one.hello()
    other.hello("b", "u")
    assert said == ["a", "b"]
    board.tell("b", {"type": "told", "message": {"tell": "x"}})
    assert other.receive()["message"] == {"tell": "x"}
    one.send(type="shout")
    assert one.receive()["what"] == "a worker sent 'shout'"


def test_arenas_are_shared_and_live_as_long_as_their_scope_says(connect, board):
    one, other = connect(), connect()
    one.hello()
    other.hello("b", "u")
    for scope in ("run", "process"):
        made = one.ask(type="arena_create", name=scope, size=4096, scope=scope)
        assert (made["ok"], made["size"], made["scope"]) == (True, 4096, scope)
        assert other.ask(type="arena_open", name=scope)["ok"]
    first, second = one.descriptors[0], other.descriptors[0]
    os.pwrite(first, b"hello", 0)
    assert os.pread(second, 5, 0) == b"hello"
    clash = other.ask(type="arena_create", name="run", size=8192, scope="run")
    assert "exists with 4096 bytes" in clash["error"]
    board.dismiss("a")
    assert one.receive() is None
    assert set(board.arenas) == {"run", "process"}
    assert other.ask(type="arena_release", name="process")["ok"]
    assert set(board.arenas) == {"run"}
    assert other.ask(type="arena_create", name="without memory", size=4096, scope="run")["ok"]
    board.dismiss("b")
    assert set(board.arenas) == {"run"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": 3},
        {"name": "x" * 513},
        {"size": 0},
        {"size": "4096"},
        {"size": 1 << 63},
        {"scope": "ever"},
        {"type": "arena_open"},
        {"type": "arena_burn"},
    ],
)
def test_an_arena_that_cannot_be_had_is_an_answer(connect, board, wrong):
    client = connect()
    client.hello()
    frame = {"type": "arena_create", "name": "x", "size": 4096, "scope": "run"} | wrong
    answer = client.ask(**frame)
    assert answer["ok"] is False
    assert answer["error"]
    assert not board.arenas


def test_a_peer_that_does_not_read_is_dropped(connect, board):
    client = connect()
    client.hello()
    for _ in range(200):
        board.tell("a", {"type": "told", "message": {"text": "x" * 60_000}})
    assert not board.connections


def test_what_a_peer_said_before_it_hung_up_is_heard_although_nothing_reaches_it_any_more(
    connect, board, said
):
    client = connect()
    client.hello()
    ask = {"type": "arena_create", "id": 1, "name": "x", "size": 4096, "scope": "process"}
    for frame in (ask, {"type": "say", "message": {"say": "saved", "step": 7}}):
        body = json.dumps(frame).encode()
        client.socket.sendall(struct.pack(">I", len(body)) + body)
    client.socket.close()
    board.tell("a", {"type": "peer"})
    board.tell("a", {"type": "peer"})
    board.drain("a")
    assert said[-1] == ("a", {"say": "saved", "step": 7})
    assert not board.connections
    board.dismiss("a")
    assert not board.arenas


def test_no_descriptor_left_costs_one_connection_and_not_the_household(
    connect, board, said, monkeypatch
):
    def refuse(descriptor):
        raise OSError(errno.EMFILE, "too many")

    client, other = connect(), connect()
    client.hello()
    other.hello()
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", refuse)
        reply = client.ask(type="arena_create", name="x", size=4096, scope="run")
    assert reply is None
    other.send(type="say", message={"say": "step", "step": 1})
    assert said[-1][1] == {"say": "step", "step": 1}
