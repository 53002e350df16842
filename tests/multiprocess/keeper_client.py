"""A small blocking client of the keeper's socket, and a keeper to talk to; for tests."""

from __future__ import annotations

import array
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DEADLINE_SECONDS = 30.0
PYTHON = sys.executable


def wait_until(condition, what="the condition", seconds=DEADLINE_SECONDS):
    """Poll until the condition gives something true; its value."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {seconds} s")
        time.sleep(0.005)


def is_alive(pid):
    """The process exists and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rfind(")") + 2] not in "ZX"


class Peer:
    """One connection to a keeper, blocking, with a deadline on everything."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(DEADLINE_SECONDS)
        self.socket.connect(path)
        self.buffer = b""
        self.descriptors = []
        self.given = []

    def send(self, message, descriptors=()):
        body = json.dumps(message).encode()
        data = struct.pack(">I", len(body)) + body
        if descriptors:
            rights = array.array("i", descriptors)
            sent = self.socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            data = data[sent:]
        self.socket.sendall(data)

    def receive(self):
        """The next frame, or None at the end; descriptors go into `message["_fds"]`."""
        while True:
            if len(self.buffer) >= 4:
                (length,) = struct.unpack_from(">I", self.buffer)
                if len(self.buffer) >= 4 + length:
                    message = json.loads(self.buffer[4 : 4 + length])
                    self.buffer = self.buffer[4 + length :]
                    count = message.get("fds", 0)
                    message["_fds"] = [self.descriptors.pop(0) for _ in range(count)]
                    self.given += message["_fds"]
                    return message
            try:
                data, ancillary, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(253 * 4))
            except ConnectionResetError:
                return None
            for _, _, content in ancillary:
                numbers = array.array("i")
                numbers.frombytes(content)
                self.descriptors.extend(numbers)
            if not data:
                return None
            self.buffer += data

    def hello(self, kind, **fields):
        self.send({"type": "hello", "version": 1, "as": kind, **fields})
        return self.receive()

    def close(self):
        for fd in self.descriptors + self.given:
            os.close(fd)
        self.descriptors, self.given = [], []
        self.socket.close()


class Agent(Peer):
    """Speaks as the agent: requests with replies, events kept in order."""

    def __init__(self, path):
        super().__init__(path)
        self.ids = itertools.count(1)
        self.events = []
        self.others = []
        self.welcome = self.hello("agent")
        assert self.welcome["type"] == "welcome", self.welcome

    def request(self, kind, /, **fields):
        number = next(self.ids)
        self.send({"type": kind, "id": number, **fields})
        while True:
            message = self.receive()
            assert message is not None, "the keeper hung up"
            if message["type"] == "reply" and message["id"] == number:
                return message
            self.take(message)

    def take(self, message):
        if message["type"] == "event":
            self.events.append({"number": message["number"], **message["event"]})
        else:
            self.others.append(message)

    def wait_event(self, kind, /, **fields):
        """The first event (past or to come) of this kind with these fields."""
        seen = 0
        while True:
            for event in self.events[seen:]:
                seen += 1
                if event["event"] == kind and all(event.get(k) == v for k, v in fields.items()):
                    return event
            message = self.receive()
            assert message is not None, "the keeper hung up"
            self.take(message)

    def wait_other(self, kind, /, **fields):
        """The first frame that is neither event nor reply."""
        while True:
            for message in self.others:
                if message["type"] == kind and all(message.get(k) == v for k, v in fields.items()):
                    return message
            message = self.receive()
            assert message is not None, "the keeper hung up"
            self.take(message)

    def spawn(self, *attempts, **batch):
        first = attempts[0] if attempts else {}
        return self.request(
            "spawn",
            batch={
                "run": batch.pop("run", first.get("run", "run-1")),
                "role": batch.pop("role", first.get("role", "main")),
                "generation": batch.pop("generation", 1),
                "zygote": batch.pop("zygote", None),
                "store": batch.pop("store", None),
                "attempts": list(attempts),
            },
        )


class KeeperUnderTest:
    """A real keeper of its own directory, started as a child of the test."""

    def __init__(self, directory, *options):
        self.directory = Path(directory)
        self.runtime = Path(tempfile.mkdtemp(prefix="argosy-t-", dir="/tmp"))
        self.options = options
        self.peers = []
        self.process = None
        self.numbers = itertools.count(1)
        self.start()

    @property
    def socket_path(self):
        return str(self.runtime / "keeper.sock")

    def start(self, *more, pass_fds=()):
        read, write = os.pipe()
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [PYTHON, "-m", "argosy.control.keeper", "--directory", str(self.directory)]
        command += ["--runtime", str(self.runtime), "--ready-fd", str(write)]
        if "--services" not in self.options:
            command.append("--no-services")
        command += [option for option in (*self.options, *more) if option != "--services"]
        with open(self.directory / "keeper.log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                pass_fds=(write, *pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(write)
        said = os.read(read, 64)
        os.close(read)
        assert said == b"ready\n", (said, self.log())
        return self.process.pid

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        return (self.directory / "keeper.log").read_text()

    def agent(self):
        agent = Agent(self.socket_path)
        self.peers.append(agent)
        return agent

    def peer(self):
        peer = Peer(self.socket_path)
        self.peers.append(peer)
        return peer

    def worker(self, order):
        peer = self.peer()
        welcome = peer.hello("worker", attempt=order["attempt"], token=order["token"])
        assert welcome["type"] == "welcome", welcome
        return peer

    def order(self, *argv, script=None, module=None, **fields):
        """The order of one attempt of a new id."""
        number = next(self.numbers)
        attempt = fields.pop("attempt", f"a{number}")
        if script is not None:
            program = {"kind": "script", "path": str(script), "args": list(argv)}
        elif module is not None:
            program = {"kind": "module", "name": module, "args": list(argv)}
        else:
            program = {"kind": "exec", "argv": list(argv)}
        logs = self.directory / "runs" / "logs"
        env = {"PATH": os.environ["PATH"], **fields.pop("env", {})}
        return {
            "attempt": attempt,
            "run": fields.pop("run", "run-1"),
            "role": fields.pop("role", "main"),
            "index": fields.pop("index", number),
            "generation": fields.pop("generation", 1),
            "token": f"token-{attempt}",
            "program": program,
            "python": PYTHON,
            "env": env,
            "cwd": str(fields.pop("cwd", self.directory)),
            "umask": 0o022,
            "limits": fields.pop("limits", {}),
            "affinity": [],
            "stdout": str(logs / f"{attempt}.out"),
            "stderr": str(logs / f"{attempt}.err"),
            "error_file": str(self.directory / "errors" / f"{attempt}.json"),
            **fields,
        }

    def python(self, code, **fields):
        """An order that runs this Python code by exec."""
        return self.order(PYTHON, "-c", code, **fields)

    def output(self, order, stream="stdout"):
        path = Path(order[stream])
        return path.read_text() if path.exists() else ""

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        """Shut down, and insist on it."""
        if self.process.poll() is None:
            try:
                agent = self.agent()
                agent.send({"type": "shutdown", "id": 0, "grace_seconds": 0.2})
                self.process.wait(DEADLINE_SECONDS)
            except (OSError, AssertionError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        from argosy.control.keeper.sweep import sweep_dead_keeper

        sweep_dead_keeper(str(self.directory), str(self.runtime))
        for peer in self.peers:
            peer.close()
        shutil.rmtree(self.runtime, ignore_errors=True)


def processes_of(directory):
    """`pid command` of every live process that belongs to this directory, by mark, arguments or environment."""
    from argosy.control.keeper.census import cluster_key, is_same_alive, look_at, marks_of

    found = []
    text = str(directory).encode()
    mark = cluster_key(str(directory))
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            environ = Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        seen = look_at(int(name))
        if seen is None or not is_same_alive(seen.pid, seen.start):
            continue
        is_ours = (
            text in words
            or text in environ
            or marks_of({seen.pid: seen})[seen.pid].startswith(mark)
        )
        # Pytest itself and its parents have the directory in no variable of theirs.
        if is_ours and b"pytest" not in words:
            found.append(f"{name} {words.replace(bytes(1), b' ').decode(errors='replace')}")
    return found
