"""The command line against a real cluster with a home of its own; nothing of it may be left at the end."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

DEADLINE_SECONDS = 60.0


def wait_until(condition, what, seconds=DEADLINE_SECONDS):
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.02)


def is_alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


class Client:
    """A command in the foreground of its own, as in another terminal; output goes to files."""

    def __init__(self, command, folder, environment, cwd, **options):
        self.out_path, self.err_path = folder / "out", folder / "err"
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                **options,
            )

    @property
    def out(self):
        return self.out_path.read_text(errors="replace")

    @property
    def err(self):
        return self.err_path.read_text(errors="replace")

    def wait_for(self, text):
        wait_until(
            lambda: text in self.out + self.err or self.process.poll() is not None,
            lambda: f"{text!r} in {self.out!r} {self.err!r}",
        )
        assert text in self.out + self.err, f"{self.out}\n{self.err}"

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def end(self):
        return self.process.wait(DEADLINE_SECONDS)


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command, environment, cwd, rows=30, columns=100):
        self.text = ""
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execvpe(command[0], command, environment)
        self.resize(rows, columns)
        self.code = None

    def resize(self, rows, columns):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text):
        os.write(self.master, text.encode())

    def wait_for(self, text):
        deadline = time.monotonic() + DEADLINE_SECONDS
        while text not in self.text:
            assert time.monotonic() < deadline, f"{text!r} not in {self.text!r}"
            if not self._read(0.5) and self.code is None and self._has_ended():
                break
        assert text in self.text, self.text
        self.text = self.text.split(text, 1)[1]

    def end(self):
        wait_until(
            lambda: (self._read(0.01), self._has_ended())[1], lambda: f"the end of {self.text}"
        )
        while self._read(0.05):
            pass
        return self.code

    def close(self):
        if not self._has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)

    def _read(self, seconds):
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def _has_ended(self):
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None


class CommandLine:
    """`argosy` with one home."""

    def __init__(self, folder):
        self.folder = folder
        self.home = folder / "home"
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.environment = {**os.environ, "ARGOSY_HOME": str(self.home)}
        self.environment.pop("NO_COLOR", None)
        self._clients = []

    def __call__(self, *arguments, code=0, **options):
        done = subprocess.run(
            self.command(*arguments),
            env=self.environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            stdin=subprocess.DEVNULL,
            **options,
        )
        assert code is None or done.returncode == code, (
            f"argosy {arguments} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def command(self, *arguments):
        return [sys.executable, "-m", "argosy", *map(str, arguments)]

    def json(self, verb, *arguments, code=0):
        return json.loads(self(verb, "--json", *arguments, code=code).stdout)

    def start(self, *arguments, **options):
        folder = self.folder / f"client-{len(self._clients)}"
        folder.mkdir()
        client = Client(self.command(*arguments), folder, self.environment, self.work, **options)
        self._clients.append(client.process)
        return client

    def terminal(self, *arguments, **options):
        environment = {**self.environment, "TERM": "xterm"}
        return Terminal(self.command(*arguments), environment, self.work, **options)

    def script(self, name, text):
        (self.work / name).write_text(text)
        return name

    def detach(self, *arguments):
        return self.json("run", "--detach", *arguments)["runs"][0]["run"]

    def is_alive(self, pid):
        return is_alive(pid)

    def wait_until(self, condition, what):
        return wait_until(condition, what)

    def view(self, run):
        return self.json("ps", run)["runs"][0]

    def processes(self, run):
        return [p for role in self.view(run)["roles"] for p in role["processes"]]

    def wait_running(self, run, count=1):
        def running():
            found = [p for p in self.processes(run) if p["state"] in ("running", "ready")]
            return found if len(found) == count else None

        return wait_until(running, f"{count} running processes of {run}")

    def wait_ended(self, run):
        return wait_until(
            lambda: (v := self.view(run))["state"] == "ended" and v, f"the end of {run}"
        )

    def facts(self, run):
        return [event["fact"] for event in self.json("events", run)["events"]]

    def leftovers(self):
        """Processes that carry this home in their environment or arguments."""
        found = {}
        mark = str(self.home).encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                if mark in text and is_alive(entry.name):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
        return found

    def close(self):
        for process in self._clients:
            if process.poll() is None:
                process.kill()
            process.wait()
        self("down", "--force", code=None)
        try:
            wait_until(lambda: not self.leftovers(), "nothing of the cluster is left", seconds=10)
        except AssertionError:
            left = self.leftovers()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"left behind: {left}") from None


@pytest.fixture(scope="module")
def argosy(tmp_path_factory):
    """One cluster for all tests of a file; what they started is gone afterwards."""
    made = CommandLine(tmp_path_factory.mktemp("cli"))
    made("up")
    yield made
    made.close()


@pytest.fixture
def fresh(tmp_path):
    """A home of the test's own, without a cluster."""
    made = CommandLine(tmp_path)
    yield made
    made.close()
