import json
import os
import socket
import struct
import threading
import time

import pytest

from argosy.errors import ArenaGone, ClusterError, ConfigError, GenerationChanged, ProtocolError
from argosy.move import broker
from argosy.protocol import link as links
from argosy.worker import gang

SECONDS = 20.0


class Keeper:
    """The worker's side of a keeper: one listening socket, frames in a list."""

    def __init__(self, path):
        self.path = str(path)
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(self.path)
        self.listening.listen()
        self.listening.settimeout(SECONDS)
        self.connection = None
        self.arenas = {}

    def accept(self, answer=None):
        self.connection, _ = self.listening.accept()
        self.connection.settimeout(SECONDS)
        hello = self.receive()
        self.send(answer or {"type": "welcome", "version": 1, "keeper": "k", "pid": os.getpid()})
        return hello

    def receive(self):
        (length,) = struct.unpack(">I", self._read(4))
        return json.loads(self._read(length))

    def _read(self, count):
        data = b""
        while len(data) < count:
            chunk = self.connection.recv(count - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def send(self, frame, descriptors=()):
        body = json.dumps(frame).encode()
        data = struct.pack(">I", len(body)) + body
        socket.send_fds(self.connection, [data], list(descriptors))

    def serve_arenas(self, count):
        for _ in range(count):
            frame = self.receive()
            reply = {"type": "reply", "id": frame["id"], "ok": True}
            name = frame["name"]
            if frame["type"] == "arena_create":
                self.arenas[name] = os.memfd_create(name)
                os.ftruncate(self.arenas[name], frame["size"])
            if name not in self.arenas:
                self.send({**reply, "ok": False, "error": f"no arena {name!r}"})
            elif frame["type"] == "arena_release":
                os.close(self.arenas.pop(name))
                self.send(reply)
            else:
                self.send({**reply, "fds": 1}, [self.arenas[name]])

    def close(self):
        for sock in (self.connection, self.listening):
            if sock is not None:
                sock.close()
        for descriptor in self.arenas.values():
            os.close(descriptor)


@pytest.fixture
def keeper(tmp_path, monkeypatch):
    made = Keeper(tmp_path / "k.sock")
    monkeypatch.setenv("ARGOSY_KEEPER_SOCKET", made.path)
    monkeypatch.setenv("ARGOSY_ATTEMPT", "a1")
    monkeypatch.setenv("ARGOSY_TOKEN", "t1")
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "ARGOSY_GENERATION": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "LOCAL_RANK": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(links, "_own", None)
    monkeypatch.setattr(gang, "_joined", None)
    yield made
    if links._own is not None:
        links._own.close()
        if links._own._thread is not None:
            links._own._thread.join(SECONDS)
    made.close()


def join_with(keeper):
    accepted = []
    acceptor = threading.Thread(target=lambda: accepted.append(keeper.accept()))
    acceptor.start()
    joined = gang.join(timeout=SECONDS)
    acceptor.join(SECONDS)
    assert keeper.receive() == {"type": "say", "message": {"say": "join", "generation": 4}}
    return joined, accepted[0]


def test_the_hello_shows_attempt_and_token(keeper):
    _, hello = join_with(keeper)
    assert hello == {"type": "hello", "version": 1, "as": "worker", "attempt": "a1", "token": "t1"}


def test_nothing_is_connected_and_no_thread_started_before_the_first_use(keeper):
    before = threading.active_count()
    made = links.current()
    assert made is links.current()
    made.ready()
    assert threading.active_count() == before
    keeper.accept()
    assert keeper.receive()["message"] == {"say": "ready"}


def test_saying_never_raises_or_blocks_when_the_keeper_is_away(keeper):
    keeper.listening.close()
    os.unlink(keeper.path)
    made = links.current()
    for number in range(5000):
        made.say({"say": "step", "step": number})
    assert made.statistics()["queued"] == 256


def test_standing_words_are_said_again_after_a_break(keeper):
    joined, _ = join_with(keeper)
    joined.ready()
    assert keeper.receive()["message"] == {"say": "ready"}
    keeper.connection.close()
    keeper.accept()
    again = [keeper.receive()["message"] for _ in range(2)]
    assert again == [{"say": "join", "generation": 4}, {"say": "ready"}]


def test_steps_are_sent_a_few_times_a_second(keeper):
    joined, _ = join_with(keeper)
    for number in range(10_000):
        joined.step(number)
    joined.ready()
    heard = []
    while (message := keeper.receive()["message"])["say"] != "ready":
        heard.append(message["step"])
    assert heard[0] == 0
    assert heard == sorted(heard)
    assert len(heard) < 1000


def test_a_peers_death_is_a_change_and_a_clean_end_is_none(keeper):
    joined, _ = join_with(keeper)
    heard = threading.Event()
    joined.on_change(lambda changed: heard.set())
    peer = {"type": "peer", "attempt": "x", "rank": 2, "index": 2, "generation": 4}
    keeper.send({**peer, "code": 0, "signal": None})
    keeper.send({**peer, "generation": 3, "code": None, "signal": 9})
    assert not joined.changed
    joined.check()
    keeper.send({**peer, "code": None, "signal": 9})
    assert joined.wait_changed(SECONDS)
    assert heard.wait(SECONDS)
    with pytest.raises(GenerationChanged, match=r"rank 2 of generation 4 died \(signal 9\)"):
        joined.check()


def test_rejoining_takes_the_new_place_and_sets_the_environment(keeper):
    joined, _ = join_with(keeper)
    told = {"tell": "reform", "generation": 6, "rank": 0, "world_size": 2}
    told |= {"master_addr": "127.0.0.2", "master_port": 4321}
    keeper.send({"type": "told", "message": {**told, "generation": 5, "rank": 1}})
    keeper.send({"type": "told", "message": told})
    keeper.send({"type": "told", "message": {**told, "generation": 5, "rank": 1}})
    assert joined.wait_changed(SECONDS)
    deadline = time.monotonic() + SECONDS
    while joined.generation != 6 and time.monotonic() < deadline:
        joined.rejoin(timeout=SECONDS)
    assert (joined.rank, joined.world_size, joined.generation) == (0, 2, 6)
    assert (joined.master_addr, joined.master_port) == ("127.0.0.2", 4321)
    assert not joined.changed
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    assert [os.environ[name] for name in names] == ["0", "2", "0", "2", "127.0.0.2", "4321"]
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "5"
    said = keeper.receive()["message"]
    while said != {"say": "join", "generation": 6}:
        assert said == {"say": "join", "generation": 5}
        said = keeper.receive()["message"]


def test_rejoining_gives_up_after_its_timeout(keeper):
    joined, _ = join_with(keeper)
    with pytest.raises(TimeoutError, match="no generation after 4"):
        joined.rejoin(timeout=0.01)


def test_outside_argosy_there_is_a_gang_of_one(monkeypatch):
    for name in ("ARGOSY_ATTEMPT", "ARGOSY_KEEPER_SOCKET", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(links, "_own", None)
    monkeypatch.setattr(gang, "_joined", None)
    joined = gang.join()
    assert (joined.rank, joined.world_size, joined.changed) == (0, 1, False)
    joined.step(1)
    joined.ready()
    joined.check()
    assert not joined.wait_changed(0)
    with pytest.raises(ConfigError, match="gang of one"):
        joined.rejoin()


def test_a_refused_process_is_told_why(keeper):
    threading.Thread(
        target=keeper.accept, args=({"type": "error", "what": "the token is wrong", "fix": ""},)
    ).start()
    with pytest.raises(ProtocolError, match="the token is wrong"):
        gang.join(timeout=SECONDS)
    links.current().ready()


def test_a_silent_keeper_ends_join_after_its_timeout(keeper):
    with pytest.raises(ClusterError, match="not answered"):
        gang.join(timeout=0.05)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x03abc", b"\0\0\0\x02[]"])
def test_garbage_from_the_keeper_makes_a_new_connection(keeper, data):
    join_with(keeper)
    keeper.connection.sendall(data)
    keeper.accept()
    assert keeper.receive()["message"] == {"say": "join", "generation": 4}


@pytest.mark.parametrize("is_joined", [False, True])
def test_arenas_are_shared_by_name(keeper, is_joined):
    if is_joined:
        join_with(keeper)

    def serve():
        if not is_joined:
            keeper.accept()
        keeper.serve_arenas(4)

    server = threading.Thread(target=serve)
    server.start()
    made, opened = broker.create("weights", 8192, scope="run"), broker.open("weights")
    os.pwrite(made.descriptor, b"hello", 0)
    assert os.pread(opened.descriptor, 5, 0) == b"hello"
    assert opened.size == 8192
    with pytest.raises(ArenaGone, match="absent"):
        broker.open("absent")
    broker.close(opened)
    # Only the last use of a name in this process is given back to the keeper.
    broker.close(made)
    server.join(SECONDS)
    assert not keeper.arenas


def test_a_forked_child_leaves_the_link_to_its_parent(keeper):
    joined, _ = join_with(keeper)
    pid = os.fork()
    if pid == 0:
        joined.ready()
        joined.step(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    joined.step(77)
    assert keeper.receive()["message"] == {"say": "step", "step": 77}
