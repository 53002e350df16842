"""The controller alone, started as the keeper starts it, with sockets of the test's own."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from argosy.control.home import open_cluster
from argosy.protocol.httpclient import Client
from argosy.protocol.messages import MOST_FRAME_BYTES, PROTOCOL_VERSION

pytestmark = pytest.mark.multiprocess
DEADLINE_SECONDS = 60.0
HELLO = {
    "type": "hello",
    "version": PROTOCOL_VERSION,
    "host": "h1",
    "keeper": "k1",
    "pid": 1,
    "cpus": 2,
    "memory_bytes": 1 << 30,
    "alive": [],
}


def wait_until(condition, what):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return value


class Alone:
    """One controller process."""

    def __init__(self, paths, *options):
        self.paths = paths
        self.is_closed = False
        self.sockets = [self._listen(paths.control_socket), self._listen(paths.http_socket)]
        tcp = socket.create_server(("127.0.0.1", 0))
        self.sockets.append(tcp)
        self.port = tcp.getsockname()[1]
        self.client = Client(paths.http_socket, timeout_seconds=30)
        self.process = self.start(*options)

    def _listen(self, path):
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(path)
        sock.listen(64)
        return sock

    def start(self, *options):
        names = ("--control-fd", "--http-fd", "--http-tcp-fd")
        numbers = [sock.fileno() for sock in self.sockets]
        given = [word for pair in zip(names, map(str, numbers), strict=True) for word in pair]
        place = ["--directory", self.paths.directory, "--runtime", self.paths.runtime]
        return subprocess.Popen(
            [sys.executable, "-m", "argosy.control.controller", *place, *given, *options],
            pass_fds=numbers,
            stderr=subprocess.PIPE,
            text=True,
        )

    def agent(self):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(DEADLINE_SECONDS)
        sock.connect(self.paths.control_socket)
        return sock

    def close(self, code=0):
        """End it and look at how it ended; what it said last."""
        if self.is_closed:
            return ""
        self.is_closed = True
        if code == 0:
            self.process.send_signal(signal.SIGTERM)
        errors = self.process.communicate(timeout=DEADLINE_SECONDS)[1]
        for sock in self.sockets:
            sock.close()
        assert self.process.returncode == code, errors
        assert "Traceback" not in errors, errors
        return errors


@pytest.fixture
def start(tmp_path):
    made = []

    def start_controller(*options, home=None):
        paths = open_cluster({"ARGOSY_HOME": str(home or tmp_path / "home")})
        made.append(Alone(paths, *options))
        return made[-1]

    yield start_controller
    for controller in made:
        controller.close()
        for name in os.listdir(controller.paths.runtime):
            os.unlink(os.path.join(controller.paths.runtime, name))
        os.rmdir(controller.paths.runtime)


def frame(message):
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">I", len(body)) + body


def receive(sock):
    """The next message; None at the end of the connection."""
    head = sock.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    body = bytearray()
    while len(body) < struct.unpack(">I", head)[0]:
        body += sock.recv(1 << 20)
    return json.loads(body)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (frame(b"\x00\xffgarbage"), "could not be read"),
        (frame({"type": "hello"}), "could not be read"),
        (frame({"type": "report", "host": "h", "keeper": "k"}), "hello"),
        (struct.pack(">I", MOST_FRAME_BYTES + 1), "over the limit"),
        (frame({**HELLO, "version": 99, "shape": "new"}), "version 99"),
        (frame(HELLO)[:20], "ended after"),
    ],
)
def test_bad_frames_close_their_connection_and_nothing_else(start, data, word):
    controller = start()
    with controller.agent() as good, controller.agent() as bad:
        good.sendall(frame(HELLO))
        assert receive(good)["type"] == "welcome"
        bad.sendall(data)
        bad.shutdown(socket.SHUT_WR)
        answer = receive(bad)
        assert answer["type"] == "error"
        assert word in answer["what"]
        assert receive(bad) is None
        assert controller.client.get("/v1/hosts")["hosts"][0]["connected"]


def test_garbage_after_a_good_hello_costs_that_link_alone(start):
    controller = start()
    with controller.agent() as agent:
        agent.sendall(frame(HELLO))
        assert receive(agent)["type"] == "welcome"
        agent.sendall(frame(b"[1, 2"))
        assert receive(agent)["type"] == "error"
    with controller.agent() as again:
        again.sendall(frame(HELLO))
        assert receive(again)["type"] == "welcome"


@pytest.mark.parametrize(
    "data", [b"\x00\xff\r\n\r\n", b"GET", b"GET / HTTP/1.1\r\n" + b"a" * 200_000]
)
def test_garbage_on_the_http_socket_disturbs_nobody(start, data):
    controller = start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(DEADLINE_SECONDS)
        sock.connect(controller.paths.http_socket)
        with contextlib.suppress(BrokenPipeError):
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            answer = sock.recv(65536)
            assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert controller.client.get("/v1/status")["hosts"] == []


def test_a_second_controller_on_the_same_home_is_refused_clearly(start):
    controller = start()
    wait_until(lambda: controller.client.get("/v1/status"), "the first one serves")
    second = controller.start()
    errors = second.communicate(timeout=DEADLINE_SECONDS)[1]
    assert second.returncode == 69
    assert f"another controller (pid {controller.process.pid})" in errors
    assert "ARGOSY_HOME" in errors
    assert controller.client.get("/v1/status")["pids"]["controller"] == controller.process.pid


def test_a_log_of_another_version_ends_the_start_with_a_fix(start, tmp_path):
    import sqlite3

    paths = open_cluster({"ARGOSY_HOME": str(tmp_path / "home")})
    connection = sqlite3.connect(paths.events)
    connection.execute("pragma user_version = 12")
    connection.close()
    errors = start().close(code=73)
    assert "version 12" in errors
    assert "fix:" in errors


def test_without_an_agent_a_submission_says_so_after_a_while(start):
    controller = start("--agent-wait-seconds", "0.2")
    body = {"spec": {"roles": {"a": {"command": ["true"]}}}}
    assert ask_tcp(controller, "/v1/runs", body)[0] == 503


def ask_tcp(controller, target, body=None):
    token = wait_until(lambda: _read(controller.paths.token), "the token").strip()
    request = urllib.request.Request(
        f"http://127.0.0.1:{controller.port}{target}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def _read(path):
    with contextlib.suppress(FileNotFoundError):
        return Path(path).read_text()
    return ""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a small disk")
def test_a_full_disk_holds_decisions_back_and_loses_nothing(start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        controller = start(home=disk / "home")
        with controller.agent() as agent:
            agent.sendall(frame(HELLO))
            assert receive(agent)["type"] == "welcome"
            before = controller.client.get("/v1/events")["events"]
            _fill(disk / "filler")
            with controller.agent() as other:
                keeper = "k" * (6 << 20)  # more than the log has in reserve
                other.sendall(frame({**HELLO, "host": "h2", "keeper": keeper}))
                wait_until(lambda: controller.client.get("/v1/status")["trouble"], "trouble")
                assert controller.client.get("/v1/events")["events"] == before
                body = {"spec": {"roles": {"a": {"command": ["true"]}}}}
                status, problem = ask_tcp(controller, "/v1/runs", body)
                assert status == 503
                assert "free some space" in problem["fix"]
                other.setblocking(False)
                with pytest.raises(BlockingIOError):
                    other.recv(1)
                other.settimeout(DEADLINE_SECONDS)
                os.unlink(disk / "filler")
                assert receive(other)["type"] == "welcome"
            facts = [event["fact"] for event in controller.client.get("/v1/events")["events"]]
            assert keeper in [fact.get("keeper") for fact in facts]
            wait_until(lambda: not controller.client.get("/v1/status")["trouble"], "no trouble")
        controller.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def _fill(path):
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 512)
