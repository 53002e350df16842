"""The link of this process to its keeper: what it says, what it asks, what it is told.

Connects when it is first used, with the attempt and token of the environment, and again after a break; what cannot be sent is
kept in a bounded outbox. It never raises into a training loop because the other side is away, starts a thread only when
asked to listen (and another one while that cannot send), and is left behind by forked children.
"""

from __future__ import annotations

import array
import collections
import contextlib
import json
import math
import os
import select
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from argosy.errors import ClusterError, ProtocolError

VERSION = 1
MOST_FRAME_BYTES = 1 << 20
_MOST_QUEUED = 256
_MOST_TOLD = 16_384
_MOST_WAITING_BYTES = 4 << 20
_MOST_DESCRIPTORS = 16
_STEP_SECONDS = 0.2
_FIRST_RETRY_SECONDS = 0.02
_MOST_RETRY_SECONDS = 1.0
_LENGTH = struct.Struct(">I")

Frame = dict[str, Any]


class Link:
    """One process's connection to the keeper; safe to use from several threads."""

    def __init__(self, path: str, attempt: str, token: str) -> None:
        self._path, self._attempt, self._token = path, attempt, token
        self._state = threading.Condition()
        self._socket: socket.socket | None = None
        self._incoming = bytearray()
        self._descriptors: list[int] = []
        self._outgoing = bytearray()
        self._outbox: collections.deque[Frame] = collections.deque(maxlen=_MOST_QUEUED)
        self._standing: dict[str, Frame] = {}
        """What the keeper must know of this process: said again after a reconnect."""
        self._replies: dict[int, tuple[Frame, list[int]] | None] = {}
        self._told: collections.deque[Frame] = collections.deque(maxlen=_MOST_TOLD)
        self._listeners: list[Callable[[Frame], None]] = []
        self._is_pumping = False
        self._is_welcome = False
        self._is_closed = False
        self._refusal = ""
        self._thread: threading.Thread | None = None
        self._flusher: threading.Thread | None = None
        self._next_id = 0
        self._num_connects = 0
        self._retry_at = 0.0
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._last_step_at = 0.0
        os.register_at_fork(after_in_child=self._forsake)

    def say(self, message: Frame, *, stand: str = "") -> None:
        """Tell the agent something, soon and never blocking; `stand` names what is said again after a reconnect."""
        with self._state:
            if self._is_closed:
                return
            if stand:
                self._standing[stand] = message
            if not stand or self._socket is not None:
                self._outbox.append(message)
            self._connect_if_due()
            self._send()
            self._flush_later()
            if not self._is_pumping:
                # Nobody else reads: what the keeper sends must not pile up until it drops us.
                self._receive()

    def ready(self) -> None:
        """Say that this process is ready to do its work."""
        self.say({"say": "ready"}, stand="ready")

    def step(self, number: int) -> None:
        """Say which step is done; cheap enough for every step, sent a few times a second."""
        now = time.monotonic()
        if now - self._last_step_at >= _STEP_SECONDS:
            self._last_step_at = now
            self.say({"say": "step", "step": number})

    def ask(self, frame: Frame, *, timeout: float) -> tuple[Frame, list[int]]:
        """Send a request and wait for its reply and descriptors."""
        with self._state:
            self._next_id += 1
            number = self._next_id
            self._replies[number] = None
        deadline = time.monotonic() + timeout
        sent_on = 0

        def is_answered() -> bool:
            nonlocal sent_on
            if self._is_welcome and sent_on != self._num_connects:
                # Requests are idempotent by name: a new connection is asked again.
                sent_on = self._num_connects
                self._queue({**frame, "id": number})
                self._send()
                self._flush_later()
            return self._replies[number] is not None

        try:
            if not self._wait(is_answered, deadline):
                raise ClusterError(
                    f"the keeper has not answered {frame['type']} within {timeout:g} s",
                    fix="see `argosy status`; the keeper restarts by itself",
                )
        finally:
            with self._state:
                answer = self._replies.pop(number, None)
        assert answer is not None
        return answer

    def listen(self, listener: Callable[[Frame], None]) -> None:
        """Call `listener` with every frame that is no reply, from a background thread."""
        with self._state:
            self._listeners.append(listener)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._listen_on, name="argosy-link", daemon=True
                )
                self._thread.start()

    def wait_welcome(self, *, timeout: float) -> None:
        """Wait until the keeper has accepted this process."""
        if not self._wait(lambda: self._is_welcome, time.monotonic() + timeout):
            raise ClusterError(
                f"the keeper at {self._path} has not answered within {timeout:g} s",
                fix="see `argosy status`",
            )

    def close(self) -> None:
        """Hang up for good."""
        with self._state:
            self._is_closed = True
            self._drop()
            self._state.notify_all()

    def statistics(self) -> dict[str, int]:
        """Counts, for people and tests."""
        return {"connects": self._num_connects, "queued": len(self._outbox)}

    # --- waiting: whoever waits reads for all -------------------------------------------------

    def _listen_on(self) -> None:
        """The one thread that calls listeners, so that they hear everything in order, whoever read it from the socket."""
        while not self._is_closed:
            self._wait(lambda: bool(self._told) or self._is_closed, None)
            with self._state:
                self._deliver()

    def _wait(self, is_done: Callable[[], bool], deadline: float | None) -> bool:
        """Wait for a condition on the link's state; one waiter at a time reads the socket on behalf of all."""
        with self._state:
            while not is_done():
                if self._refusal:
                    raise ProtocolError(self._refusal, fix="run the program with `argosy run`")
                if self._is_closed:
                    return False
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    return False
                if self._is_pumping:
                    self._state.wait(remaining)
                    continue
                self._is_pumping = True
                try:
                    self._pump(remaining)
                finally:
                    self._is_pumping = False
                    self._state.notify_all()
            return True

    def _deliver(self) -> None:
        """Hand what was told to the listeners, with the lock released: they may run the user's code."""
        while self._told:
            frame, listeners = self._told.popleft(), list(self._listeners)
            self._state.release()
            try:
                for listener in listeners:
                    _call(listener, frame)
            finally:
                self._state.acquire()

    def _pump(self, remaining: float | None) -> None:
        """Wait, with the lock released, until the socket or the next attempt to connect is due."""
        self._connect_if_due()
        sock = self._socket
        until_retry = None if sock is not None else max(0.0, self._retry_at - time.monotonic())
        waits = [seconds for seconds in (remaining, until_retry) if seconds is not None]
        self._state.release()
        try:
            _wait_socket(sock, bool(self._outgoing), min(waits, default=None))
        finally:
            self._state.acquire()
        if sock is self._socket:
            self._send()
            self._receive()

    # --- the connection; the lock is held -----------------------------------------------------

    def _connect_if_due(self) -> None:
        if self._socket is not None or self._is_closed or time.monotonic() < self._retry_at:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
        except OSError:
            sock.close()
            self._retry_at = time.monotonic() + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, _MOST_RETRY_SECONDS)
            return
        self._socket = sock
        self._num_connects += 1
        hello = {"type": "hello", "version": VERSION, "as": "worker"}
        self._queue({**hello, "attempt": self._attempt, "token": self._token})
        for message in self._standing.values():
            self._queue({"type": "say", "message": message})

    def _queue(self, frame: Frame) -> None:
        body = json.dumps(frame, separators=(",", ":")).encode()
        self._outgoing += _LENGTH.pack(len(body)) + body

    def _send(self) -> bool:
        """Send what is possible without waiting; False: the keeper has hung up."""
        if self._socket is None:
            return False
        while self._outbox and len(self._outgoing) < _MOST_WAITING_BYTES:
            self._queue({"type": "say", "message": self._outbox.popleft()})
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:
            return False  # what the keeper sent before it hung up is still to be read
        return True

    def _flush_later(self) -> None:
        """What cannot be sent now must not wait for the next word: whoever reads for all does not look for room to write."""
        if self._outgoing and self._is_pumping and self._flusher is None:
            self._flusher = threading.Thread(
                target=self._flush, name="argosy-link-flush", daemon=True
            )
            self._flusher.start()

    def _flush(self) -> None:
        with self._state:
            is_open = True
            while is_open and (sock := self._socket) is not None and self._outgoing:
                self._state.release()
                try:
                    _wait_socket(sock, True, None, is_reading=False)
                finally:
                    self._state.acquire()
                if sock is self._socket:
                    is_open = self._send()
            self._flusher = None

    def _receive(self) -> None:
        """Read what is there; the end of the stream drops the connection."""
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * 4)
        while self._socket is not None:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(65536, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            for _, kind, payload in ancillary:
                if kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) // 4 * 4])
                    self._descriptors.extend(numbers)
            if not data:
                self._drop()
                return
            self._incoming += data
            try:
                self._take_frames()
            except ValueError:
                self._drop()  # not a frame: begin anew

    def _take_frames(self) -> None:
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > MOST_FRAME_BYTES:
                raise ValueError("oversized frame")
            if len(self._incoming) < _LENGTH.size + length:
                return
            frame = json.loads(self._incoming[_LENGTH.size : _LENGTH.size + length])
            del self._incoming[: _LENGTH.size + length]
            if not isinstance(frame, dict):
                raise ValueError("not an object")
            count = int(frame.get("fds", 0))
            own, self._descriptors = self._descriptors[:count], self._descriptors[count:]
            self._dispatch(frame, own)

    def _dispatch(self, frame: Frame, descriptors: list[int]) -> None:
        kind = frame.get("type")
        if kind == "welcome":
            self._is_welcome = True
            self._retry_seconds = _FIRST_RETRY_SECONDS
        elif kind == "error":
            self._refusal = str(frame.get("what", "the keeper refused this process"))
            self._is_closed = True
            self._drop()
        elif kind == "reply" and frame.get("id") in self._replies:
            self._replies[frame["id"]] = (frame, descriptors)
            descriptors = []
        else:
            self._told.append(frame)
        for descriptor in descriptors:
            os.close(descriptor)
        self._state.notify_all()

    def _drop(self) -> None:
        """Forget the connection; a later use makes a new one."""
        if self._socket is not None:
            # Closing alone does not wake a thread that waits for it.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._retry_at = time.monotonic() + self._retry_seconds
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._socket = None
        self._is_welcome = False
        self._incoming.clear()
        self._outgoing.clear()
        self._descriptors = []
        self._state.notify_all()

    def _forsake(self) -> None:
        """In a forked child: this link is the parent's."""
        self._state = threading.Condition()
        self._is_closed = True
        self._thread = self._flusher = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _call(listener: Callable[[Frame], None], frame: Frame) -> None:
    """A listener that raises must not make this process deaf."""
    try:
        listener(frame)
    except Exception:  # noqa: BLE001 - the user's code may be behind it
        try:
            traceback.print_exc()
        except (OSError, ValueError):
            pass  # a program that has closed its stderr does not want to know


def _wait_socket(
    sock: socket.socket | None, is_sending: bool, seconds: float | None, *, is_reading: bool = True
) -> None:
    if sock is None:
        time.sleep(1.0 if seconds is None else seconds)
        return
    try:
        # poll, not epoll: it keeps hold of a socket that another thread shuts down and closes, and sees the end.
        waiting = select.poll()
        mask = (select.POLLIN if is_reading else 0) | (select.POLLOUT if is_sending else 0)
        waiting.register(sock, mask)
        waiting.poll(None if seconds is None else math.ceil(1000 * seconds))
    except (OSError, ValueError):
        pass  # closed by another thread meanwhile; the caller looks again


_own: Link | None = None
_own_lock = threading.Lock()


def current() -> Link | None:
    """The link of this process; None outside Argosy."""
    global _own
    with _own_lock:
        if _own is None and is_under_argosy():
            environment = os.environ
            _own = Link(
                environment["ARGOSY_KEEPER_SOCKET"],
                environment["ARGOSY_ATTEMPT"],
                environment.get("ARGOSY_TOKEN", ""),
            )
        return _own


def is_under_argosy() -> bool:
    """Whether this process was started by Argosy."""
    return "ARGOSY_ATTEMPT" in os.environ and "ARGOSY_KEEPER_SOCKET" in os.environ
