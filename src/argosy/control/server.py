"""The doors of the HTTP API: uvicorn's protocol on the listening sockets that the keeper handed over.

The unix socket takes processes of this user alone. Loopback TCP takes whoever shows the token, under a Host and an Origin that are
this server's own. There is no ticking server object: an idle API costs no wakeup.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
import struct
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from argosy.control.api import Problem
from argosy.control.home import Cluster
from argosy.errors import ArgosyError

_CREDENTIALS = struct.Struct("3i")
_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


class LocalProtocol(H11Protocol):
    """HTTP on the unix socket: connections of other users are closed unread."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Look at who connects."""
        sock = transport.get_extra_info("socket")
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        super().connection_made(transport)
        if uid != os.getuid():
            transport.close()


class TokenGate:
    """ASGI around the application on TCP: token, Host and Origin are checked before anything else."""

    def __init__(self, application: Any, token: str, port: int) -> None:
        self._application = application
        self._token = token
        self._hosts = {f"{name}:{port}" for name in _LOCAL_NAMES}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        scope, token = _take_token(scope, headers)
        refusal = self._refusal(headers, token)
        if refusal is None:
            await self._application(scope, receive, send)
            return
        status, problem = refusal
        answer = [(b"content-type", b"application/json"), (b"connection", b"close")]
        if status == 401:
            answer.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": msgspec.json.encode(problem)})

    def _refusal(self, headers: dict[bytes, str], token: str) -> tuple[int, Problem] | None:
        host = headers.get(b"host", "").lower()
        if host not in self._hosts:
            what = f"Host {host!r} is not this server's"
            return 403, Problem(error=what, fix=f"use {min(self._hosts)}")
        origin = headers.get(b"origin")
        if origin is not None and origin.removeprefix("http://").lower() not in self._hosts:
            what = f"Origin {origin!r} is not this server's"
            return 403, Problem(error=what, fix=f"open the page from http://{min(self._hosts)}")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            fix = "send `Authorization: Bearer TOKEN` with the content of the cluster's token file"
            return 401, Problem(error="the token is missing or wrong", fix=fix)
        return None


def _take_token(scope: Any, headers: dict[bytes, str]) -> tuple[Any, str]:
    """The token that was shown, and the request without it.

    A browser's EventSource can send no header: a stream may have it in its query. Nothing else may, as addresses end in histories and logs;
    and no cookie, which a browser would show to every other server of this machine.
    """
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    rest = urlencode([(name, value) for name, value in query if name != "token"])
    request = {**scope, "query_string": rest.encode()}
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return request, token.strip()
    is_stream = scope["method"] == "GET" and "text/event-stream" in headers.get(b"accept", "")
    return request, dict(query).get("token", "") if is_stream else ""


def refusing(error: ArgosyError) -> Any:
    """An application that answers every question with an error, in the place of an API that cannot be served."""
    body = msgspec.json.encode(Problem(error=error.what, fix=error.fix))
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 507, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer


class HttpServer:
    """Serves one application on both doors."""

    def __init__(self) -> None:
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []

    async def serve_local(self, application: Any, sock: socket.socket) -> None:
        """Begin on the unix socket."""
        config = _config(application)
        sock.setblocking(False)
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: LocalProtocol(config, self._state, {}), sock=sock
        )
        self._servers.append(server)

    async def serve_tcp(self, application: Any, sock: socket.socket, cluster: Cluster) -> None:
        """Begin on loopback TCP; writes the token and the port for those who may read the home."""
        port = sock.getsockname()[1]
        config = _config(TokenGate(application, ensure_token(cluster.token), port))
        sock.setblocking(False)
        server = await asyncio.get_running_loop().create_server(
            lambda: H11Protocol(config, self._state, {}), sock=sock
        )
        self._servers.append(server)
        write_private(cluster.http_json, json.dumps({"port": port}))

    def close(self) -> None:
        """Stop serving and drop the connections."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def ensure_token(path: str) -> str:
    """The cluster's token; made on first use, readable by its owner alone."""
    try:
        with open(path, encoding="ascii") as file:
            token = file.read().strip()
        if token:
            return token
    except FileNotFoundError:
        pass
    token = secrets.token_urlsafe(32)
    write_private(path, token + "\n")
    return token


def write_private(path: str, text: str) -> None:
    """Write a file of mode 0600 in one step."""
    draft = f"{path}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(draft, path)


def _config(application: Any) -> Config:
    config = Config(
        application,
        http="h11",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=60,
        h11_max_incomplete_event_size=64 << 10,
    )
    config.load()
    return config
