"""A keeper small enough to read at a glance: starts one zygote and speaks the wire of docs/reference/keeper-protocol.md.

Used by the zygote's tests, in the test's own process, which it makes a subreaper for as long as it is open.
"""

import array
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
PR_CAPBSET_DROP = 24
CAP_SYS_NICE = 23
MARK_ROOM = 96
_libc = ctypes.CDLL(None, use_errno=True)


def send_frame(sock, message, descriptors=()):
    body = json.dumps(message).encode()
    data = struct.pack(">I", len(body)) + body
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    sent = sock.sendmsg([data], ancillary)
    sock.sendall(data[sent:])


def receive_frame(sock, timeout=60):
    """One frame and its descriptors; None at the end of the stream."""
    sock.settimeout(timeout)
    numbers = array.array("i")

    def read(count):
        data = b""
        while len(data) < count:
            chunk, ancillary, _, _ = sock.recvmsg(count - len(data), socket.CMSG_SPACE(253 * 4))
            for _, _, payload in ancillary:
                numbers.frombytes(payload)
            if not chunk:
                return None
            data += chunk
        return data

    head = read(4)
    if head is None:
        return None
    body = read(struct.unpack(">I", head)[0])
    return json.loads(body), list(numbers)


def _children():
    """Children of this process, adopted ones included."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in text.split()}


class Process:
    """One forked attempt: its pid, gate and output files."""

    def __init__(self, directory, name):
        self.pid = 0
        self.name = name
        self.stdout = Path(directory, f"{name}.out")
        self.stderr = Path(directory, f"{name}.err")
        self.error_file = Path(directory, f"{name}.json")
        self.gate = -1
        self.status = None

    def open_gate(self, env=None):
        os.write(self.gate, b"g" + json.dumps({"env": env or {}}).encode())
        self.close_gate()

    def close_gate(self):
        if self.gate >= 0:
            os.close(self.gate)
            self.gate = -1

    def wait(self, timeout=60):
        """Exit code, negative for a signal."""
        if self.status is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise TimeoutError(f"{self.name} (pid {self.pid}) has not ended")
            finally:
                os.close(pidfd)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status


def _prepare_zygote(is_privileged):
    _libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)
    if not is_privileged:
        os.nice(5)
        _libc.prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)


class FakeKeeper:
    """Starts a zygote and forks through it; every process it got is ended by `close`."""

    _num_open = 0
    _num_made = 0

    def __init__(self, directory, preload=(), env=None, cwd="/", is_privileged=True):
        """Unprivileged: at nice level 5, without the right to lower it."""
        self.directory = Path(directory)
        self.processes = []
        self._next = 0
        self._base_env = dict(os.environ if env is None else env)
        FakeKeeper._num_open += 1
        FakeKeeper._num_made += 1
        self._prefix = f"k{FakeKeeper._num_made}-"
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.socket, theirs = socket.socketpair()
        zygote_env = {**self._base_env, "ARGOSY_MARK": self._prefix.ljust(MARK_ROOM, "-")}
        self.zygote = subprocess.Popen(
            [sys.executable, "-m", "argosy.control.zygote", "--socket", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=zygote_env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: _prepare_zygote(is_privileged),
        )
        theirs.close()
        send_frame(self.socket, {"type": "preload", "modules": list(preload), "layer": 1})
        received = receive_frame(self.socket)
        self.ready = received[0] if received else None

    def fork(self, attempts, sock=None):
        """Ask for a batch; the reply. Each attempt may name `secrets` (descriptors) and `listener`, which are sent along."""
        self._next += 1
        items, descriptors, made, ours = [], [], [], []
        for number, attempt in enumerate(attempts):
            process = Process(self.directory, f"{self._next}-{number}")
            process.mark = f"{self._prefix}{process.name}"
            read_end, process.gate = os.pipe()
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            streams = attempt.pop("streams", None)
            if streams is None:
                streams = [os.open(p, flags, 0o600) for p in (process.stdout, process.stderr)]
                ours += streams
            ours.append(read_end)
            secrets = attempt.pop("secrets", {})
            listener = attempt.pop("listener", None)
            descriptors += [read_end, *streams, *secrets.values()]
            descriptors += [] if listener is None else [listener]
            item = {
                "attempt": process.name,
                "env": self._base_env,
                "cwd": str(self.directory),
                "umask": 0o022,
                "limits": {},
                "affinity": [],
                "nice": 0,
                "threads": None,
                "oom_score_adj": None,
                "tty": False,
                "error_file": str(process.error_file),
                "mark": process.mark,
                "helper": None,
                "secret_names": list(secrets),
                **attempt,
            }
            items.append(item)
            made.append(process)
        frame = {"type": "fork", "id": self._next, "keeper": os.getpid(), "attempts": items}
        channel = sock or self.socket
        send_frame(channel, {**frame, "fds": len(descriptors)}, descriptors)
        for descriptor in ours:
            os.close(descriptor)
        reply = self.receive_reply(channel)
        if reply["type"] != "forked":
            for process in made:
                process.close_gate()
            return reply, []
        for process, pid in zip(made, reply["pids"], strict=True):
            process.pid = pid
        self.processes += made
        return reply, made

    def receive_reply(self, channel):
        while True:
            message, descriptors = receive_frame(channel)
            if message["type"] in ("forked", "refused"):
                return message
            for descriptor in descriptors:
                os.close(descriptor)

    def run(self, program, **attempt):
        """Fork one attempt, open its gate and wait for its end."""
        reply, made = self.fork([{"program": program, **attempt}])
        if not made:
            raise AssertionError(reply)
        made[0].open_gate()
        made[0].wait()
        return made[0]

    def close(self):
        for process in self.processes:
            process.close_gate()
            if process.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()
        self._end_layers()
        self.socket.close()
        try:
            self.zygote.wait(20)
        except subprocess.TimeoutExpired:
            self.zygote.kill()
            self.zygote.wait()
            raise
        finally:
            leftovers = self._sweep()
            FakeKeeper._num_open -= 1
            _libc.prctl(PR_SET_CHILD_SUBREAPER, int(FakeKeeper._num_open > 0), 0, 0, 0)
        assert not leftovers, f"left behind: {leftovers}"

    def _end_layers(self):
        """Kill second layers that were announced and not taken: they may still be importing."""
        while select.select([self.socket], [], [], 0)[0]:
            try:
                received = receive_frame(self.socket)
            except ConnectionError:
                return
            if received is None:
                return
            if received[0]["type"] == "layer":
                os.kill(received[0]["pid"], signal.SIGKILL)
            for descriptor in received[1]:
                os.close(descriptor)

    def _own_children(self):
        """Children that carry a mark of this keeper, or are zombies and need only be reaped."""
        own = set()
        for pid in _children():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if not environ or f"ARGOSY_MARK={self._prefix}".encode() in environ:
                    own.add(pid)
        return own

    def _sweep(self):
        """Reap children that were adopted; return those that are still alive after a moment, killed."""
        # A layer that was forked just now finishes its imports before it sees that nobody wants it.
        deadline = time.monotonic() + 30
        while (pids := self._own_children()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            select.select([], [], [], 0.01)
        named = []
        for pid in pids:
            named.append((pid, Path(f"/proc/{pid}/cmdline").read_bytes()))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return named

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def script(path, *args):
    return {"kind": "script", "path": str(path), "args": [str(a) for a in args]}
