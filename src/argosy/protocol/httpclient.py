"""The command line's HTTP client: JSON requests and server-sent events over a unix socket.

Called by control/submission.py and by every verb of the command line. Only `socket` and `json` are imported, because the way
from a typed command to a submitted run is measured in milliseconds. It never starts a cluster and never retries by itself
what may have been carried out.
"""

from __future__ import annotations

import json
import select
import socket
import time

from argosy.errors import (
    ArgosyError,
    ClusterError,
    ConfigError,
    ForgottenError,
    HomeError,
    NotFoundError,
    ProtocolError,
)

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SILENCE_SECONDS = 2.0
"""After so long without an answer the client's `on_silence` is asked what is wrong."""
MOST_HEADER_BYTES = 64 << 10
MOST_BODY_BYTES = 256 << 20
_RECEIVE_BYTES = 256 << 10


class Response:
    """An answer: status, headers with lower-case names, and the whole body."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def json(self) -> Any:
        """The body as JSON; a ProtocolError when it is none."""
        try:
            return json.loads(self.body) if self.body else None
        except ValueError as error:
            raise ProtocolError(
                f"the controller answered with something that is not JSON ({error})",
                fix="see controller.log in the cluster's directory (`argosy status`)",
            )


class ServerEvent:
    """One server-sent event."""

    __slots__ = ("data", "id", "kind")

    def __init__(self, kind: str, data: str, id: str) -> None:
        self.kind = kind
        self.data = data
        self.id = id

    def json(self) -> Any:
        """The data as JSON; a ProtocolError when it is none."""
        try:
            return json.loads(self.data)
        except ValueError as error:
            raise ProtocolError(f"an event of the stream is not JSON ({error})")


class Client:
    """Requests to one unix socket; each on a connection of its own, so that nothing is ever sent into a closed one."""

    def __init__(
        self,
        path: str,
        *,
        timeout_seconds: float = 30.0,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        """`on_silence` is called while an answer is overdue; it may raise, to say what is wrong."""
        self.path = path
        self.timeout_seconds = timeout_seconds
        self.on_silence = on_silence or (lambda: None)

    def get(self, target: str) -> Any:
        """GET and decode; errors of the server become the error classes for people."""
        return checked(self.request("GET", target)).json()

    def post(self, target: str, body: Any = None) -> Any:
        """POST JSON and decode the answer."""
        return checked(self.request("POST", target, body)).json()

    def request(self, method: str, target: str, body: Any = None) -> Response:
        """One request, one answer. OSError when the connection fails: see `unreachable()`."""
        with self._connect() as connection:
            try:
                connection.sendall(_render(method, target, body, ("connection: close",)))
            except BrokenPipeError:
                # Refused unread, as a body that is too large: the answer says why. Without one, reading fails.
                pass
            self._await_answer(connection)
            head, rest = _read_head(connection)
            status, headers = _parse_head(head)
            return Response(status, headers, _read_body(connection, headers, rest))

    def stream(self, target: str, *, last_id: str = "") -> EventStream:
        """Open a stream of server-sent events, going on after `last_id`."""
        extra = ["accept: text/event-stream"]
        if last_id:
            extra.append(f"last-event-id: {last_id}")
        connection = self._connect()
        try:
            connection.sendall(_render("GET", target, None, extra))
            self._await_answer(connection)
            head, rest = _read_head(connection)
            status, headers = _parse_head(head)
            if status != 200:
                checked(Response(status, headers, _read_body(connection, headers, rest)))
                raise ProtocolError(f"GET {target} answered {status} instead of a stream")
        except BaseException:
            connection.close()
            raise
        return EventStream(connection, headers, rest)

    def _await_answer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + self.timeout_seconds
        patience = min(SILENCE_SECONDS, self.timeout_seconds)
        while not select.select([connection], [], [], patience)[0]:
            self.on_silence()
            if time.monotonic() >= deadline:
                raise TimeoutError("timed out")

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout_seconds)
            connection.connect(self.path)
        except BaseException:
            connection.close()
            raise
        return connection


class EventStream:
    """An open stream of events; `wait()` gives what has come, `is_closed` when the server has ended it."""

    def __init__(self, connection: socket.socket, headers: dict[str, str], rest: bytes) -> None:
        self._connection = connection
        is_chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._chunks = ChunkDecoder() if is_chunked else None
        self._parser = EventParser()
        self._ready = self._take(rest) if rest else []
        self._is_over = self._chunks is not None and self._chunks.is_complete
        connection.setblocking(False)

    @property
    def is_closed(self) -> bool:
        """The server has ended the stream and every event of it was handed out."""
        return self._is_over and not self._ready

    @property
    def last_id(self) -> str:
        """Id of the newest event that has been handed out or waits to be."""
        return self._parser.last_id

    def fileno(self) -> int:
        """For select."""
        return self._connection.fileno()

    def wait(
        self, timeout_seconds: float | None, *others: int
    ) -> tuple[list[ServerEvent], list[int]]:
        """Events that have come, and which of the other descriptors are readable; both empty after the timeout."""
        if self._ready:
            ready, self._ready = self._ready, []
            return ready, []
        waiting: list[int] = list(others)
        if not self._is_over:
            waiting.append(self.fileno())
        readable, _, _ = select.select(waiting, [], [], timeout_seconds)
        events = self._receive() if not self._is_over and self.fileno() in readable else []
        return events, [fd for fd in others if fd in readable]

    def close(self) -> None:
        """Close the connection; again is fine."""
        self._connection.close()
        self._is_over = True

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> list[ServerEvent]:
        try:
            data = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            self._connection.close()
            self._is_over = True
            return []
        events = self._take(data)
        if self._chunks is not None and self._chunks.is_complete:
            self._connection.close()
            self._is_over = True
        return events

    def _take(self, data: bytes) -> list[ServerEvent]:
        return self._parser.feed(self._chunks.feed(data) if self._chunks else data)


class ChunkDecoder:
    """Chunked transfer encoding, a piece at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0
        self.is_complete = False

    def feed(self, data: bytes) -> bytes:
        """The payload contained in what has come so far and was not given out yet."""
        self._buffer += data
        out = []
        while not self.is_complete:
            if self._left:
                piece = self._buffer[: self._left]
                # The two bytes after a chunk are its line end, not payload.
                out.append(piece[: max(0, self._left - 2)])
                self._left -= len(piece)
                self._buffer = self._buffer[len(piece) :]
                if self._left:
                    break
                continue
            line, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                if len(self._buffer) > 1024:
                    raise ProtocolError("a chunk of the controller's answer has no size")
                break
            self._buffer = rest
            size = self._size(line)
            if size == 0:
                self.is_complete = True
            else:
                self._left = size + 2
        return b"".join(out)

    @staticmethod
    def _size(line: bytes) -> int:
        try:
            size = int(line.split(b";")[0], 16)
        except ValueError:
            size = -1
        if not 0 <= size <= MOST_BODY_BYTES:
            raise ProtocolError(f"the controller sent a chunk of size {line[:20]!r}")
        return size


class EventParser:
    """Server-sent events, a piece at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._kind = ""
        self._data: list[str] = []
        self.last_id = ""

    def feed(self, data: bytes) -> list[ServerEvent]:
        """The events completed by these bytes."""
        whole, newline, self._buffer = (self._buffer + data).rpartition(b"\n")
        if len(self._buffer) > MOST_BODY_BYTES:
            raise ProtocolError("the controller sent an endless line in a stream of events")
        if not newline:
            return []
        events = []
        for raw in whole.decode("utf-8", "surrogateescape").split("\n"):
            line = raw.rstrip("\r")
            if not line:
                if self._data:
                    events.append(
                        ServerEvent(self._kind or "message", "\n".join(self._data), self.last_id)
                    )
                self._kind, self._data = "", []
                continue
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                self._data.append(value)
            elif field == "event":
                self._kind = value
            elif field == "id":
                self.last_id = value
        return events


def checked(response: Response) -> Response:
    """The response if it is a success; else the error for people that the server described."""
    if 200 <= response.status < 300:
        return response
    what, fix = f"the controller answered {response.status}", ""
    try:
        described = json.loads(response.body)
    except ValueError:
        described = None
    if isinstance(described, dict) and isinstance(described.get("error"), str):
        what = described["error"]
        fix = described.get("fix") or ""
    raise _error_class(response.status)(what, fix=fix)


def unreachable(error: OSError, path: str) -> ClusterError:
    """What to tell a person when the controller's socket does not answer."""
    if isinstance(error, TimeoutError):
        return ClusterError(
            f"the controller did not answer in time on {path}",
            fix="see controller.log in the cluster's directory, or `argosy down --force`",
        )
    if isinstance(error, PermissionError):
        return ClusterError(
            f"{path} belongs to another user", fix="set ARGOSY_HOME to a directory of your own"
        )
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return ClusterError(
            f"the controller went away during the request ({error})",
            fix="it is restarted by itself: look with `argosy ps`, then try again",
        )
    return ClusterError("no cluster is running here", fix="start one with `argosy up`")


def _error_class(status: int) -> type[ArgosyError]:
    if status in (400, 413, 422):
        return ConfigError
    if status == 410:
        return ForgottenError
    if status == 404:
        return NotFoundError
    if status == 507:
        return HomeError
    if status == 426:
        return ProtocolError
    return ClusterError


def _render(method: str, target: str, body: Any, extra: list[str] | tuple[str, ...]) -> bytes:
    payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
    lines = [f"{method} {target} HTTP/1.1", "host: argosy", *extra]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(payload)}"]
    return "\r\n".join([*lines, "", ""]).encode() + payload


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > MOST_HEADER_BYTES:
            raise ProtocolError("the controller's answer has an endless header")
        piece = connection.recv(_RECEIVE_BYTES)
        if not piece:
            raise ConnectionResetError("the connection was closed before the answer was complete")
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdecimal():
        raise ProtocolError(
            f"what listens there does not speak HTTP: {lines[0][:80]!r}",
            fix="`argosy status` shows the socket; `argosy down --force` ends what is left of an old cluster",
        )
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


def _read_body(connection: socket.socket, headers: dict[str, str], rest: bytes) -> bytes:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _read_chunked(connection, rest)
    length = headers.get("content-length")
    if length is not None and (not length.isdecimal() or int(length) > MOST_BODY_BYTES):
        raise ProtocolError(f"the controller announced an answer of {length[:20]} bytes")
    pieces, got = [rest], len(rest)
    while length is None or got < int(length):
        piece = connection.recv(_RECEIVE_BYTES)
        if not piece:
            break
        pieces.append(piece)
        got += len(piece)
        if got > MOST_BODY_BYTES:
            raise ProtocolError("the controller's answer does not end")
    if length is not None and got < int(length):
        raise ConnectionResetError("the connection was closed before the answer was complete")
    body = b"".join(pieces)
    return body if length is None else body[: int(length)]


def _read_chunked(connection: socket.socket, rest: bytes) -> bytes:
    decoder = ChunkDecoder()
    pieces = [decoder.feed(rest)]
    while not decoder.is_complete:
        piece = connection.recv(_RECEIVE_BYTES)
        if not piece:
            raise ConnectionResetError("the connection was closed before the answer was complete")
        pieces.append(decoder.feed(piece))
    return b"".join(pieces)
