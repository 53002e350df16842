"""Who is on the other end: every connection begins with a hello and becomes agent, worker, attach or resize.

Peers of another uid, of another version or with a wrong token are refused with an error frame, and nothing else happens.
Requests of the agent go to `requests`; workers speak to their run's arenas and peers here.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from argosy.control.keeper.arenas import Arena, ArenaError
from argosy.control.keeper.attempts import Attempt
from argosy.control.keeper.ends import oldest_generation
from argosy.control.keeper.frames import MOST_AGENT_BYTES, VERSION, Connection, Message, encode
from argosy.control.keeper.loop import READ, log, log_exception
from argosy.control.keeper.outbox import bounded_text
from argosy.control.keeper.requests import Requests
from argosy.control.keeper.state import Keeper

_HELLO_SECONDS = 30.0
_MOST_STRANGERS = 256
_MOST_LINKS = 64
_MOST_SAID_BYTES = 64 << 10
_MOST_AGENT_QUEUE = 256 << 20
_CREDENTIALS = struct.Struct("3i")


class Links:
    """Accepts connections and sorts them."""

    def __init__(self, keeper: Keeper, requests: Requests) -> None:
        self.keeper = keeper
        self.requests = requests
        self.strangers: set[Connection] = set()
        """Connected, no hello yet."""
        keeper.arenas.announce = self._to_agent
        keeper.blobs.announce = self._to_agent

    def listen(self) -> None:
        """Accept from now on."""
        listener = self.keeper.listeners["keeper"]
        listener.setblocking(False)
        self.keeper.loop.watch(listener.fileno(), READ, lambda mask: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: the connection stays readable, so look away for a while.
            log(f"a connection could not be accepted: {error.strerror}")
            self.keeper.loop.forget(listener.fileno())
            self.keeper.loop.after(0.5, self.listen)
            return
        connection = Connection(
            self.keeper.loop, sock, on_frame=self._first, on_close=self.strangers.discard
        )
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            connection.fail(
                f"uid {uid} may not speak to the keeper of uid {os.getuid()}",
                "run the command as the user who started the cluster",
            )
            return
        if len(self.strangers) >= _MOST_STRANGERS:
            connection.fail("too many connections without a hello", "close the idle ones")
            return
        self.strangers.add(connection)

        def expire() -> None:
            if connection in self.strangers:
                connection.close()

        self.keeper.loop.after(_HELLO_SECONDS, expire)

    def _first(self, connection: Connection, message: Message, descriptors: list[int]) -> None:
        for fd in descriptors:
            os.close(fd)
        self.strangers.discard(connection)
        if message.get("type") != "hello":
            connection.fail(
                f"the first message is {message.get('type')!r}, not a hello", "say hello first"
            )
        elif message.get("version", VERSION) != VERSION:
            connection.fail(
                f"version {message.get('version')!r} is spoken, the keeper speaks {VERSION}",
                "use the same version of argosy as the running cluster, or restart it: argosy down",
            )
        else:
            kinds = {
                "agent": self._welcome_agent,
                "worker": self._welcome_worker,
                "attach": self._welcome_attach,
                "resize": self._resize,
            }
            kind = message.get("as")
            welcome = kinds.get(kind) if isinstance(kind, str) else None
            if welcome is None:
                connection.fail(f"hello as {kind!r} is unknown", f"use one of {', '.join(kinds)}")
            else:
                welcome(connection, message)

    def _welcome(self, connection: Connection) -> None:
        connection.send(
            {
                "type": "welcome",
                "version": VERSION,
                "keeper": self.keeper.id,
                "pid": self.keeper.pid,
            }
        )

    # --- agent --------------------------------------------------------------------------------

    def _welcome_agent(self, connection: Connection, message: Message) -> None:
        old, self.keeper.agent = self.keeper.agent, None
        if old is not None:
            old.fail("another agent has taken over", "only one agent speaks for a host")
        self._welcome(connection)
        self.adopt_agent(connection)
        self.keeper.arenas.hold_all()
        self.keeper.blobs.hold_all()

    def adopt_agent(self, connection: Connection, *, has_asked: bool = False) -> None:
        """This connection is the agent from now on; events begin to flow with its first request."""
        connection.most_bytes = MOST_AGENT_BYTES
        connection.most_queued_bytes = _MOST_AGENT_QUEUE
        connection.on_frame = self.requests.serve if has_asked else self.requests.serve_first
        connection.on_close = self._agent_left
        self.keeper.agent = connection
        self.keeper.outbox.send = connection.send if has_asked else None

    def _agent_left(self, connection: Connection) -> None:
        if self.keeper.agent is connection:
            self.keeper.agent = None
            self.keeper.outbox.send = None

    def _to_agent(self, frame: Message, descriptors: list[int]) -> None:
        if self.keeper.agent is not None:
            self.keeper.agent.send(frame, descriptors)

    # --- worker -------------------------------------------------------------------------------

    def _welcome_worker(self, connection: Connection, message: Message) -> None:
        attempt = self._attempt_of(message)
        token = str(message.get("token", ""))
        if attempt is None or attempt.token != token:
            connection.fail(
                f"attempt {message.get('attempt')!r} is unknown here or its token is wrong",
                "use ARGOSY_ATTEMPT and ARGOSY_TOKEN of the process's own environment",
            )
            return
        if len(attempt.links) >= _MOST_LINKS:
            connection.fail(f"attempt {attempt.attempt} has {_MOST_LINKS} links", "close some")
            return
        self._welcome(connection)
        self.adopt_worker(connection, attempt)
        self._catch_up(connection, attempt)

    def _catch_up(self, connection: Connection, attempt: Attempt) -> None:
        """What was told before this link was there: it may be the process's first, or the next after a break."""
        oldest = oldest_generation(attempt)
        for frame in self.keeper.ends.since(attempt.run, attempt.role, oldest):
            connection.send(frame)
        if attempt.reform is not None:
            connection.send({"type": "told", "message": attempt.reform})

    def adopt_worker(self, connection: Connection, attempt: Attempt) -> None:
        """This connection is a link of that attempt from now on."""
        attempt.links.append(connection)
        self.keeper.linked.setdefault((attempt.run, attempt.role), {})[attempt.attempt] = attempt
        connection.on_frame = lambda c, message, fds: self._from_worker(c, attempt, message, fds)
        connection.on_close = lambda c: self._drop_link(attempt, c)

    def _drop_link(self, attempt: Attempt, connection: Connection) -> None:
        if connection in attempt.links:
            attempt.links.remove(connection)
        if not attempt.links:
            linked = self.keeper.linked.get((attempt.run, attempt.role), {})
            linked.pop(attempt.attempt, None)
            if not linked:
                self.keeper.linked.pop((attempt.run, attempt.role), None)

    def _attempt_of(self, message: Message) -> Attempt | None:
        name = message.get("attempt")
        attempt = self.keeper.attempts.get(name) if isinstance(name, str) else None
        if attempt is None or attempt.is_helper or attempt.state == "exited":
            return None
        return attempt

    def _from_worker(
        self, connection: Connection, attempt: Attempt, message: Message, descriptors: list[int]
    ) -> None:
        for fd in descriptors:
            os.close(fd)
        kind = message.get("type")
        try:
            if kind == "say":
                self._say(connection, attempt, message.get("message"))
            elif isinstance(kind, str) and kind.startswith("arena_"):
                self._arena(connection, attempt, message)
            else:
                connection.fail(
                    f"a worker sent {kind!r}", "use say or arena_create, _open, _release"
                )
        except Exception as error:  # noqa: BLE001 - entry point of every worker's frame
            log_exception(f"a worker's {kind!r}")
            connection.fail(f"the keeper failed at this: {error!r}")

    def _say(self, connection: Connection, attempt: Attempt, said: Any) -> None:
        if not isinstance(said, dict):
            connection.fail("say: message is no object", "send an object")
            return
        if said.get("say") == "error":
            attempt.error = bounded_text(str(said.get("text", "")))
            said = {**said, "text": attempt.error}
        elif said.get("say") == "saving":
            self.requests.exits.prolong(attempt)
        if len(encode(said)) > _MOST_SAID_BYTES:
            connection.fail(
                f"a message is larger than {_MOST_SAID_BYTES} bytes", "use an arena or a file"
            )
            return
        self.keeper.outbox.emit(
            {"event": "link", "attempt": attempt.attempt, "run": attempt.run, "message": said}
        )

    def _arena(self, connection: Connection, attempt: Attempt, message: Message) -> None:
        number = message.get("id")
        try:
            arena = self._ask_arena(attempt, message)
        except ArenaError as error:
            connection.send({"type": "reply", "id": number, "ok": False, "error": str(error)})
            return
        reply: Message = {"type": "reply", "id": number, "ok": True}
        if arena is None:
            connection.send(reply)
        else:
            reply |= {"name": arena.name, "size": arena.size, "scope": arena.scope, "fds": 1}
            connection.send(reply, [arena.fd])

    def _ask_arena(self, attempt: Attempt, message: Message) -> Arena | None:
        kind, name = message["type"], message.get("name")
        if not isinstance(name, str):
            raise ArenaError(f"{kind}: name is missing")
        arenas = self.keeper.arenas
        if kind == "arena_create":
            size, scope = message.get("size"), message.get("scope", "process")
            if type(size) is not int or not isinstance(scope, str):
                raise ArenaError("arena_create: size is no number or scope no text")
            return arenas.create(attempt.run, name, size, scope, attempt.attempt)
        if kind == "arena_open":
            return arenas.open(attempt.run, name, attempt.attempt)
        if kind == "arena_release":
            arenas.release(attempt.run, name, attempt.attempt)
            return None
        raise ArenaError(f"unknown request {kind!r}")

    # --- terminals ----------------------------------------------------------------------------

    def _welcome_attach(self, connection: Connection, message: Message) -> None:
        attempt = self._attempt_of(message)
        if attempt is None:
            connection.fail(f"attempt {message.get('attempt')!r} is not running")
        elif attempt.terminal is None:
            connection.fail(
                f"attempt {attempt.attempt} has no terminal",
                "start the run with --tty; `argosy logs -f` follows its output",
            )
        elif len(attempt.terminal.clients) >= _MOST_LINKS:
            connection.fail(f"{_MOST_LINKS} clients are attached already", "detach some")
        else:
            self._welcome(connection)
            self.adopt_attached(connection, attempt)

    def adopt_attached(self, connection: Connection, attempt: Attempt) -> None:
        """This connection is a raw view of the attempt's terminal from now on."""
        terminal = attempt.terminal
        if terminal is None:
            connection.close()
            return
        connection.on_close = terminal.detach
        terminal.attach(connection)

    def _resize(self, connection: Connection, message: Message) -> None:
        attempt = self._attempt_of(message)
        rows, columns = message.get("rows"), message.get("columns")
        if attempt is None or attempt.terminal is None:
            connection.fail(f"attempt {message.get('attempt')!r} has no terminal")
        elif type(rows) is not int or type(columns) is not int:
            connection.fail("resize needs rows and columns", "send numbers")
        else:
            attempt.terminal.resize(rows, columns)
            self._welcome(connection)
            connection.close_when_written()
