"""A real cluster (keeper, agent, controller) with a home of its own, driven over HTTP; nothing of it may be left at the end."""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from argosy.control.home import Cluster as Paths
from argosy.control.home import open_cluster
from argosy.control.submission import bring_up
from argosy.errors import ArgosyError
from argosy.protocol.httpclient import Client

DEADLINE_SECONDS = 60.0


def wait_until(condition, what, seconds=DEADLINE_SECONDS):
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


class Cluster:
    """One cluster and its HTTP API."""

    def __init__(self, home, paths: Paths):
        self.home = home
        self.paths = paths
        self.client = Client(paths.http_socket, timeout_seconds=30)

    def get(self, target):
        return self._patiently(lambda: self.client.get(target))

    def post(self, target, body):
        return self.client.post(target, body)

    def _patiently(self, ask):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                return ask()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def submit(self, roles, *, env=None, secrets=None, cwd="/", **spec):
        body = {
            "spec": {"name": "test", "roles": roles, **spec},
            "env": env if env is not None else dict(os.environ),
            "cwd": str(cwd),
            "python": sys.executable,
            "secrets": secrets or {},
        }
        return self.post("/v1/runs", body)["runs"][0]["run"]

    def view(self, run):
        return self.get(f"/v1/runs/{run}")

    def processes(self, run):
        return [process for role in self.view(run)["roles"] for process in role["processes"]]

    def wait_state(self, run, *states):
        def reached():
            processes = self.processes(run)
            return processes if all(p["state"] in states for p in processes) else None

        return wait_until(reached, f"{run} is {states}")

    def wait_ended(self, run):
        return wait_until(
            lambda: view if (view := self.view(run))["state"] == "ended" else None, f"end of {run}"
        )

    def facts(self, run=""):
        return [event["fact"] for event in self.get(f"/v1/events?run={run}&limit=100000")["events"]]

    def lines(self, run, **query):
        words = "&".join(f"{key}={value}" for key, value in query.items())
        return self.get(f"/v1/runs/{run}/logs?{words}")["lines"]

    def pids(self):
        return self.get("/v1/status")["pids"]

    def leftovers(self):
        found = {}
        mark = str(self.home).encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if mark in text and b"State:\tZ" not in (entry / "status").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        return found

    def close(self):
        with contextlib.suppress(ArgosyError, OSError):
            self.post("/v1/down", {"force": True})
        try:
            wait_until(lambda: not self.leftovers(), "nothing of the cluster is left", seconds=30)
        except AssertionError:
            left = self.leftovers()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            logs = "".join(path.read_text()[-2000:] for path in self.home.rglob("c*.log"))
            raise AssertionError(f"left behind: {left}\n{logs}") from None
        finally:
            shutil.rmtree(self.paths.runtime, ignore_errors=True)


class Sse:
    """A raw stream of server-sent events, as a browser reads it."""

    def __init__(self, path, target, last_id=""):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_SECONDS)
        self.socket.connect(path)
        extra = f"last-event-id: {last_id}\r\n" if last_id else ""
        self.socket.sendall(f"GET {target} HTTP/1.1\r\nhost: x\r\n{extra}\r\n".encode())
        self.file = self.socket.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        self.last_id = ""
        while self.file.readline().strip():
            pass

    def events(self):
        """(event, data) as they come, to the end of the stream."""
        event, data = "message", None
        for line in self._lines():
            name, _, value = line.partition(": ")
            if name == "event":
                event = value
            elif name == "id":
                self.last_id = value
            elif name == "data":
                data = json.loads(value)
            elif not line and data is not None:
                yield event, data
                event, data = "message", None

    def _lines(self):
        rest = b""
        while True:
            size = int(self.file.readline().strip() or b"0", 16)
            if size == 0:
                return
            rest += self.file.read(size)
            self.file.readline()
            *whole, rest = rest.split(b"\n")
            yield from (line.decode() for line in whole)

    def close(self):
        self.file.close()
        self.socket.close()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster that runs; whatever it started is gone afterwards."""
    home = tmp_path / "home"
    monkeypatch.setenv("ARGOSY_HOME", str(home))
    paths = open_cluster()
    made = Cluster(home, paths)
    bring_up(paths)
    yield made
    made.close()


@pytest.fixture(scope="module")
def quiet_cluster(tmp_path_factory):
    """One cluster for all tests of a file that start nothing in it."""
    home = tmp_path_factory.mktemp("quiet") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARGOSY_HOME", str(home))
        paths = open_cluster()
        made = Cluster(home, paths)
        bring_up(paths)
        yield made
        made.close()


@pytest.fixture
def follow(cluster):
    """Open streams of the cluster; closed at the end."""
    opened = []

    def open_stream(target, last_id=""):
        opened.append(Sse(cluster.paths.http_socket, target, last_id))
        return opened[-1]

    yield open_stream
    for stream in opened:
        stream.close()
