"""The household's end of its ranks' links: the worker's part of the keeper's protocol, and the arenas.

Answers hello, arena requests and messages on one private unix socket, so that `protocol/link` and `move/broker` work in a household
as they do in a cluster; see docs/reference/keeper-protocol.md. Owned by `household`, which calls it from its one thread. Nothing
here blocks: a peer that does not read is dropped, garbage ends its connection and nothing else, and what a peer said before it hung up is
still heard.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from argosy.errors import NoRoom
from argosy.move import broker
from argosy.protocol.link import MOST_FRAME_BYTES, VERSION

Frame = Mapping[str, Any]
_MOST_QUEUED_BYTES = 4 << 20
_MOST_LINKS = 64
_MOST_NAME = 512
_MOST_ARENA = 1 << 62
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")


class Connection:
    """One peer; frames in and out, never blocking."""

    def __init__(self, board: Switchboard, sock: socket.socket) -> None:
        self.board = board
        self.socket = sock
        self.attempt = ""
        """Empty until it has said hello."""
        self.is_closed = False
        self._is_deaf = False
        """The peer has hung up: nothing reaches it any more."""
        self._incoming = bytearray()
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        sock.setblocking(False)
        board.selector.register(sock, selectors.EVENT_READ, self.ready)

    def send(self, frame: Frame, descriptors: list[int] | None = None) -> None:
        """Send one frame, now or when the peer reads; the descriptors stay the caller's."""
        if self.is_closed or self._is_deaf:
            return
        body = json.dumps(frame, separators=(",", ":")).encode()
        try:
            copies = [os.dup(descriptor) for descriptor in descriptors or []]
        except OSError:
            # None are left: the peer asks again, and the others go on.
            self.close()
            return
        self._queue.append((_LENGTH.pack(len(body)) + body, copies))
        self._flush()

    def refuse(self, what: str, fix: str = "") -> None:
        """Say what is wrong and hang up."""
        self.send({"type": "error", "what": what, "fix": fix})
        self.close()

    def ready(self, mask: int) -> None:
        """The socket can be read or written."""
        if mask & selectors.EVENT_WRITE and not self.is_closed:
            self._flush()
        if mask & selectors.EVENT_READ and not self.is_closed:
            self.receive()

    def receive(self) -> None:
        """Take everything that has arrived."""
        while not self.is_closed:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(
                    1 << 16, socket.CMSG_SPACE(64), socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, ancillary = b"", []
            _close_received(ancillary)
            if not data:
                self.close()
                return
            self._incoming += data
            try:
                self._take_frames()
            except (ValueError, RecursionError) as error:
                self.refuse(f"this is no frame: {error}", "send length-prefixed JSON objects")

    def close(self) -> None:
        """Hang up."""
        if not self.is_closed:
            self.is_closed = True
            self.board.selector.unregister(self.socket)
            self.socket.close()
            self._drop_queue()
            self.board.connections.discard(self)

    def _take_frames(self) -> None:
        while len(self._incoming) >= _LENGTH.size and not self.is_closed:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > MOST_FRAME_BYTES:
                raise ValueError(f"{length} bytes are more than {MOST_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._incoming) < end:
                return
            frame = json.loads(self._incoming[_LENGTH.size : end])
            del self._incoming[:end]
            if not isinstance(frame, dict):
                raise ValueError("not a JSON object")
            self.board.take(self, frame)

    def _flush(self) -> None:
        try:
            while self._queue and not self.is_closed:
                data, descriptors = self._queue[0]
                sent = self._send_some(data, descriptors)
                _close_all(descriptors)
                if sent < len(data):
                    self._queue[0] = (data[sent:], [])
                else:
                    self._queue.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except (BrokenPipeError, ConnectionResetError):
            # What it said before it hung up is still to be read; the end of its stream closes this.
            self._is_deaf = True
            self._drop_queue()
        except OSError:
            self.close()
            return
        if self.is_closed:
            return
        if sum(len(data) for data, _ in self._queue) > _MOST_QUEUED_BYTES:
            self.close()
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._queue else 0)
        self.board.selector.modify(self.socket, mask, self.ready)

    def _drop_queue(self) -> None:
        for _, descriptors in self._queue:
            _close_all(descriptors)
        self._queue.clear()

    def _send_some(self, data: bytes, descriptors: list[int]) -> int:
        rights = array.array("i", descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        return self.socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


@dataclass
class Arena:
    """One shared memfd."""

    size: int
    scope: str
    descriptor: int
    users: set[str] = field(default_factory=set)


class Switchboard:
    """Listens, knows who may speak, keeps the arenas; what ranks say goes to `on_said`."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_said: Callable[[str, Frame], None],
        on_welcome: Callable[[str], None],
    ) -> None:
        self.selector = selector
        self.on_said = on_said
        self.on_welcome = on_welcome
        self.connections: set[Connection] = set()
        self.arenas: dict[str, Arena] = {}
        self._tokens: dict[str, str] = {}
        self._listener, self._anchor, self.path = _listen_unseen()
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def admit(self, attempt: str, token: str) -> None:
        """This attempt may say hello from now on."""
        self._tokens[attempt] = token

    def tell(self, attempt: str, frame: Frame) -> None:
        """Send to every link of the attempt; one that is not connected yet is told when it is welcomed."""
        for connection in self._links_of(attempt):
            connection.send(frame)

    def drain(self, attempt: str) -> None:
        """Take what a process said before it ended."""
        for connection in self._links_of(attempt):
            connection.receive()

    def dismiss(self, attempt: str) -> None:
        """The attempt has ended: hang up, and release what only it used."""
        self._tokens.pop(attempt, None)
        for connection in self._links_of(attempt):
            connection.close()
        for name in [name for name, arena in self.arenas.items() if attempt in arena.users]:
            self._drop_user(name, attempt)

    def close(self) -> None:
        """Hang up on everybody and let go of the memory; in a forked child: leave both to the parent."""
        for connection in list(self.connections):
            connection.close()
        self.selector.unregister(self._listener)
        self._listener.close()
        _close_all([arena.descriptor for arena in self.arenas.values()])
        self.arenas.clear()
        _forget_socket(self.path, self._anchor)

    def close_copies(self) -> None:
        """In a forked child: close its copies of the descriptors, and touch nothing that is shared."""
        for connection in self.connections:
            connection.socket.close()
        self._listener.close()
        _close_all([arena.descriptor for arena in self.arenas.values()])
        if self._anchor >= 0:
            os.close(self._anchor)

    def take(self, connection: Connection, frame: dict[str, Any]) -> None:
        """One frame of a peer."""
        kind = frame.get("type")
        if not connection.attempt:
            self._hello(connection, frame)
        elif kind == "say" and isinstance(frame.get("message"), dict):
            self.on_said(connection.attempt, frame["message"])
        elif isinstance(kind, str) and kind.startswith("arena_"):
            self._serve_arena(connection, frame)
        else:
            connection.refuse(f"a worker sent {kind!r}", "use say or arena_create, _open, _release")

    def _accept(self, mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            sock.close()
            return
        self.connections.add(Connection(self, sock))

    def _hello(self, connection: Connection, frame: Frame) -> None:
        attempt, token = str(frame.get("attempt")), frame.get("token")
        if frame.get("type") != "hello" or frame.get("version", VERSION) != VERSION:
            connection.refuse("the first message is no hello of this version", "say hello first")
        elif attempt not in self._tokens or self._tokens[attempt] != token:
            connection.refuse(
                f"attempt {attempt!r} is unknown here or its token is wrong",
                "use ARGOSY_ATTEMPT and ARGOSY_TOKEN of the process's own environment",
            )
        elif len(self._links_of(attempt)) >= _MOST_LINKS:
            connection.refuse(f"attempt {attempt} has {_MOST_LINKS} links", "close some")
        else:
            connection.attempt = attempt
            welcome = {"type": "welcome", "version": VERSION, "keeper": "household"}
            connection.send({**welcome, "pid": os.getpid()})
            self.on_welcome(attempt)

    def _links_of(self, attempt: str) -> list[Connection]:
        return [connection for connection in self.connections if connection.attempt == attempt]

    # --- arenas -----------------------------------------------------------------------------------

    def _serve_arena(self, connection: Connection, frame: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"type": "reply", "id": frame.get("id"), "ok": True}
        name = frame.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
            reply |= {"ok": False, "error": f"an arena's name has 1 to {_MOST_NAME} characters"}
            connection.send(reply)
            return
        try:
            arena = self._find_arena(connection.attempt, name, frame)
        except ValueError as error:
            connection.send({**reply, "ok": False, "error": str(error)})
            return
        if arena is None:
            connection.send(reply)
        else:
            reply |= {"name": name, "size": arena.size, "scope": arena.scope, "fds": 1}
            connection.send(reply, [arena.descriptor])

    def _find_arena(self, attempt: str, name: str, frame: Frame) -> Arena | None:
        """The arena that the reply carries; None after a release. ValueError: why it cannot be had."""
        kind, arena = frame["type"], self.arenas.get(name)
        if kind == "arena_create":
            arena = self._create_arena(name, arena, frame.get("size"), frame.get("scope"))
        if arena is None:
            raise ValueError(f"this run has no arena {name!r}")
        if kind == "arena_release":
            self._drop_user(name, attempt)
            return None
        if kind not in ("arena_create", "arena_open"):
            raise ValueError(f"unknown request {kind!r}")
        arena.users.add(attempt)
        return arena

    def _create_arena(self, name: str, found: Arena | None, size: Any, scope: Any) -> Arena:
        if type(size) is not int or not 0 < size <= _MOST_ARENA or scope not in ("process", "run"):
            raise ValueError(f"arena {name!r} of {size!r} bytes with scope {scope!r}")
        if found is not None:
            if (found.size, found.scope) != (size, scope):
                raise ValueError(
                    f"arena {name!r} exists with {found.size} bytes and scope {found.scope!r}, "
                    f"not {size} and {scope!r}"
                )
            return found
        try:
            made = Arena(size, str(scope), broker.memfd(name, size))
        except NoRoom as error:
            raise ValueError(error.what)
        self.arenas[name] = made
        return made

    def _drop_user(self, name: str, attempt: str) -> None:
        arena = self.arenas[name]
        arena.users.discard(attempt)
        if not arena.users and (arena.scope == "process" or broker.is_empty(arena.descriptor)):
            del self.arenas[name]
            os.close(arena.descriptor)


def _listen_unseen() -> tuple[socket.socket, int, str]:
    """A listening socket without a name on disk, if the kernel lets its path be reached through /proc; else in a private directory.

    Nobody removes a directory after the household was killed with -9: so the socket is unlinked at once and reached through a
    descriptor of this process.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = tempfile.mkdtemp(prefix="argosy-")
    path = os.path.join(directory, "s")
    listener.bind(path)
    listener.listen(128)
    anchor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    unseen = f"/proc/{os.getpid()}/fd/{anchor}"
    os.unlink(path)
    os.rmdir(directory)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
            trial.connect(unseen)
        listener.accept()[0].close()
        return listener, anchor, unseen
    except OSError:
        os.close(anchor)
        listener.close()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = tempfile.mkdtemp(prefix="argosy-")
    path = os.path.join(directory, "s")
    listener.bind(path)
    listener.listen(128)
    return listener, -1, path


def _forget_socket(path: str, anchor: int) -> None:
    if anchor >= 0:
        os.close(anchor)
        return
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))


def _close_received(ancillary: list[tuple[int, int, bytes]]) -> None:
    for _, kind, payload in ancillary:
        if kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) // 4 * 4])
            _close_all(numbers)


def _close_all(descriptors: Any) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
