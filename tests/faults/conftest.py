"""A real local cluster with a home of its own, driven by the command line; nothing of it may be left at the end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_SECONDS = 60.0


class Cluster:
    """The command line against one home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {
            **os.environ,
            "ARGOSY_HOME": str(home),
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        self.clients: list[subprocess.Popen] = []

    def argosy(self, *arguments, check=True, timeout=DEADLINE_SECONDS, env=None, **options):
        done = subprocess.run(
            [sys.executable, "-m", "argosy", *map(str, arguments)],
            env={**self.environment, **(env or {})},
            capture_output=True,
            timeout=timeout,
            check=False,
            **{"text": True, **options},
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"argosy {arguments} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def start(self, *arguments):
        """A client in the foreground of its own, as in another terminal."""
        client = subprocess.Popen(
            [sys.executable, "-m", "argosy", *map(str, arguments)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.clients.append(client)
        return client

    def json(self, *arguments):
        return json.loads(self.argosy(*arguments, "--json").stdout)

    def pids(self):
        return self.json("status")["pids"]

    def view(self, run):
        return self.json("ps", run)["runs"][0]

    def processes(self, run, role=None):
        return [
            p for r in self.view(run)["roles"] if role in (None, r["role"]) for p in r["processes"]
        ]

    def running_pids(self, run):
        return [p["pid"] for p in self.processes(run) if p["state"] in ("running", "ready")]

    def facts(self, run=None):
        arguments = ["events", run] if run else ["events"]
        return [e["fact"] | {"seq": e["seq"]} for e in self.json(*arguments)["events"]]

    def wait_until(self, condition, what, seconds=DEADLINE_SECONDS):
        return wait_until(condition, what, seconds)

    def wait_running(self, run, count):
        return self.wait_until(
            lambda: pids if len(pids := self.running_pids(run)) == count else None,
            f"{count} running processes of {run}",
        )

    def detach(self, *arguments):
        """Start a run detached; its id."""
        return self.argosy("run", "--detach", *arguments).stdout.strip()

    def leftovers(self):
        """Processes that still carry this home in their environment or arguments."""
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
        for client in self.clients:
            if client.poll() is None:
                client.kill()
            client.communicate()
        self.argosy("down", "--force", check=False)
        try:
            wait_until(lambda: not self.leftovers(), "nothing of the cluster is left", seconds=10)
        except AssertionError:
            left = self.leftovers()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"left behind: {left}") from None


def wait_until(condition, what, seconds=DEADLINE_SECONDS):
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {seconds} s: {said}")
        time.sleep(0.02)


def is_alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One cluster for all tests of a file that leave it as it was."""
    made = Cluster(tmp_path_factory.mktemp("shared") / "home")
    made.argosy("up")
    yield made
    made.close()


@pytest.fixture
def cluster(tmp_path):
    """A home of its own; whatever the test started in it is gone afterwards."""
    made = Cluster(tmp_path / "home")
    yield made
    made.close()
