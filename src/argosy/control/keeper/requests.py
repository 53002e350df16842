"""What the agent may ask: one method per request type of docs/reference/keeper-protocol.md.

Each request gets exactly one reply. A wrong request is answered with an error that names the field; a bug is answered
too and logged; neither disturbs anything else.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from argosy.control.keeper.arenas import ArenaError
from argosy.control.keeper.attempts import Attempt, OrderError
from argosy.control.keeper.ends import MOST_PLACES
from argosy.control.keeper.exits import Exits
from argosy.control.keeper.frames import Connection, Message
from argosy.control.keeper.loop import log_exception
from argosy.control.keeper.ports import PortError
from argosy.control.keeper.starts import Starts
from argosy.control.keeper.state import Keeper
from argosy.control.keeper.zygotes import SpecError

_SHUTDOWN_GRACE_SECONDS = 2.0
_MOST_RECORDS_AT_ONCE = 16

Reply = dict[str, Any]


class Requests:
    """The agent's side of the keeper."""

    def __init__(self, keeper: Keeper, exits: Exits, starts: Starts) -> None:
        self.keeper = keeper
        self.exits = exits
        self.starts = starts
        self.on_shutdown: Callable[[float], None] = lambda grace: None
        self.on_restart: Callable[[Callable[[str], None]], None] = lambda refused: None
        self.service_statistics: Callable[[], dict[str, Any]] = dict
        self._is_tidying = False
        self._handlers: dict[str, Callable[[Message], Reply | None]] = {
            "list": self._list,
            "release": self._release,
            "stop": self._stop,
            "kill": self._kill,
            "signal": self._signal,
            "ack": self._acknowledge,
            "tell": self._tell,
            "put_blob": self._put_blob,
            "get_blob": self._get_blob,
            "drop_blob": self._drop_blob,
            "reserve": self._reserve,
            "unreserve": self._unreserve,
            "end_run": self._end_run,
            "warm": self._warm,
            "statistics": self._statistics,
            "shutdown": self._shutdown,
        }

    def serve_first(self, connection: Connection, message: Message, descriptors: list[int]) -> None:
        """The first request opens the flow of events: after the answer to `list`, else before it."""
        connection.on_frame = self.serve
        if self.keeper.agent is connection:
            self.keeper.outbox.send = connection.send
        if message.get("type") != "list":
            self.keeper.outbox.resend()
        self.serve(connection, message, descriptors)

    def serve(self, connection: Connection, message: Message, descriptors: list[int]) -> None:
        """Carry out one request and reply."""
        number = message.get("id")
        kind = message.get("type")

        def reply(content: Reply) -> None:
            connection.send({"type": "reply", "id": number, "ok": True, **content})

        def refuse(error: str) -> None:
            connection.send({"type": "reply", "id": number, "ok": False, "error": error})

        try:
            if kind == "spawn":
                self.starts.spawn(message.get("batch"), reply)
            elif kind == "hold":
                self._adopt(message, descriptors)
                reply({})
            elif kind == "restart":
                self.on_restart(refuse)
                reply({})
            elif not isinstance(kind, str) or kind not in self._handlers:
                refuse(f"unknown request {kind!r}")
            else:
                reply(self._handlers[kind](message) or {})
                if kind == "list":
                    self.keeper.outbox.resend()
        except (OrderError, ArenaError, PortError, SpecError) as error:
            refuse(str(error))
        except Exception as error:  # noqa: BLE001 - entry point of every request; the keeper must outlive a bug
            log_exception(f"request {kind!r}")
            refuse(f"the keeper failed at this: {error!r}")
        for fd in descriptors:
            os.close(fd)

    def _adopt(self, message: Message, descriptors: list[int]) -> None:
        if len(descriptors) != 1:
            raise OrderError("hold needs one descriptor")
        fd = descriptors.pop()
        if message.get("kind") == "blob":
            self.keeper.blobs.adopt(message, fd)
        else:
            self.keeper.arenas.adopt(message, fd)

    def _list(self, message: Message) -> Reply:
        keeper = self.keeper
        return {
            "attempts": [a.listing() for a in keeper.attempts.values() if not a.is_helper],
            "blobs": keeper.blobs.listing(),
            "arenas": keeper.arenas.listing(),
            "zygotes": self.starts.zygotes.listing(),
            "ports": keeper.ports.listing(),
        }

    def _attempt(self, message: Message) -> Attempt:
        name = message.get("attempt")
        attempt = self.keeper.attempts.get(name) if isinstance(name, str) else None
        if attempt is None:
            raise OrderError(f"no attempt {name!r}")
        return attempt

    def _known(self, message: Message) -> Attempt | None:
        """None for one that is over and acknowledged: ending it again is fine."""
        return None if message.get("attempt") in self.keeper.ended else self._attempt(message)

    def _release(self, message: Message) -> None:
        env = message.get("env") or {}
        gang = message.get("gang") or {}
        if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
            raise OrderError("release: env is not an object of text")
        attempt = self._attempt(message)
        if attempt.state == "starting" and attempt.order.get("parked"):
            raise OrderError(f"attempt {attempt.attempt} is not parked yet")
        self.starts.release(attempt, env, gang if isinstance(gang, dict) else {})

    def _stop(self, message: Message) -> None:
        grace = message.get("grace_seconds", 10.0)
        if not isinstance(grace, int | float):
            raise OrderError("stop: grace_seconds is no number")
        number = _signal_number(message.get("signal", "SIGTERM"))
        attempt = self._known(message)
        if attempt is not None:
            self.exits.stop(attempt, number, float(grace))

    def _kill(self, message: Message) -> None:
        attempt = self._known(message)
        if attempt is not None:
            self.exits.kill(attempt)

    def _signal(self, message: Message) -> None:
        number = _signal_number(message.get("signal"))
        attempt = self._attempt(message)
        if not self.exits.signal(attempt, number):
            raise OrderError(f"attempt {attempt.attempt} is not running")

    def _acknowledge(self, message: Message) -> None:
        through = message.get("through")
        if not isinstance(through, int):
            raise OrderError("ack: through is no number")
        for name in self.keeper.outbox.acknowledge(through):
            self.keeper.forget(name)
        if not self._is_tidying:
            self._is_tidying = True
            self._tidy()

    def _tidy(self) -> None:
        """Remove some exit records, then the others after whatever else has happened: a disk may take its time."""
        self._is_tidying = self.keeper.outbox.tidy(_MOST_RECORDS_AT_ONCE)
        if self._is_tidying:
            self.keeper.loop.soon(self._tidy)

    def _tell(self, message: Message) -> None:
        told = message.get("message")
        if not isinstance(told, dict):
            raise OrderError("tell: message is no object")
        generation, rank = told.get("generation"), told.get("rank")
        is_place = isinstance(generation, int) and isinstance(rank, int)
        is_reform = told.get("tell") == "reform" and is_place
        name = str(message.get("attempt"))
        if is_reform and self.exits.tell_late_place(name, int(generation or 0), int(rank or 0)):
            return
        attempt = self._attempt(message)
        if not attempt.links:
            raise OrderError(f"attempt {attempt.attempt} has no link")
        if is_reform:
            if attempt.rank is not None and attempt.generation != generation:
                place = [attempt.generation, attempt.rank]
                attempt.places = [*attempt.places, place][-MOST_PLACES:]
            attempt.generation, attempt.rank = int(generation or 0), int(rank or 0)
            attempt.reform = told
        for link in list(attempt.links):
            link.send({"type": "told", "message": told})

    def _put_blob(self, message: Message) -> None:
        self.keeper.blobs.put(_text(message, "name"), _text(message, "data", may_be_empty=True))

    def _get_blob(self, message: Message) -> Reply:
        data = self.keeper.blobs.get(_text(message, "name"))
        return {"data": data.decode("utf-8", "surrogateescape")}

    def _drop_blob(self, message: Message) -> None:
        self.keeper.blobs.drop(_text(message, "name"))

    def _reserve(self, message: Message) -> Reply:
        ports = message.get("ports")
        if not isinstance(ports, dict):
            raise OrderError("reserve: ports is no object")
        return {"ports": self.keeper.ports.reserve(_text(message, "run"), ports)}

    def _unreserve(self, message: Message) -> None:
        self.keeper.ports.release(_text(message, "run"))

    def _end_run(self, message: Message) -> Reply:
        run = _text(message, "run")
        live = [
            attempt
            for attempt in self.keeper.attempts.values()
            if attempt.run == run and attempt.state != "exited" and not attempt.is_helper
        ]
        if live:
            names = ", ".join(attempt.attempt for attempt in live[:5])
            raise OrderError(f"run {run} still has {len(live)} live attempts: {names}")
        self.starts.stores.run_ended(run)
        self.keeper.ends.run_ended(run)
        self.keeper.ports.release(run)
        return {"arenas": self.keeper.arenas.run_ended(run)}

    def _warm(self, message: Message) -> None:
        self.starts.zygotes.warm(message.get("zygote"))

    def _statistics(self, message: Message) -> Reply:
        keeper = self.keeper
        states: dict[str, int] = {}
        for attempt in keeper.attempts.values():
            states[attempt.state] = states.get(attempt.state, 0) + 1
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "keeper": keeper.id,
            "pid": keeper.pid,
            "uptime_seconds": time.time() - keeper.born,
            "rss_bytes": _resident_bytes(),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,
            "attempts": states,
            "containment": keeper.containment.method,
            "containment_reasons": keeper.containment.reasons,
            "zygotes": self.starts.zygotes.listing(),
            "services": self.service_statistics(),
            **keeper.outbox.statistics(),
        }

    def _shutdown(self, message: Message) -> None:
        grace = message.get("grace_seconds", _SHUTDOWN_GRACE_SECONDS)
        self.on_shutdown(float(grace) if isinstance(grace, int | float) else 0.0)


def _text(message: Message, name: str, *, may_be_empty: bool = False) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise OrderError(f"{message.get('type')}: {name} is missing or no text")
    return value


def _signal_number(value: Any) -> int:
    """From a name (`SIGUSR1`, `USR1`) or a number."""
    if isinstance(value, str):
        name = value if value.startswith("SIG") else f"SIG{value}"
        found = getattr(signal, name, None)
        if isinstance(found, signal.Signals):
            return int(found)
    elif isinstance(value, int) and value in signal.valid_signals():
        return value
    raise OrderError(f"no signal {value!r}")


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
