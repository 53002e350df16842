"""The controller process: takes its lock, replays the log, serves agents, then the HTTP API. Started and restarted by the keeper.

    python -m argosy.control.controller --directory D --runtime R --control-fd N --http-fd N --http-tcp-fd N

It may be killed at any moment: all it knows is in the log and in the keepers. When its keeper dies it sees to it that there is a
new one, and ends; the new keeper starts a new controller.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from argosy.control.conductor import Conductor
from argosy.control.eventlog import EventLog
from argosy.control.home import Cluster
from argosy.control.keeper.records import read_json
from argosy.control.keeperlink import Held
from argosy.control.presence import LifeWatch, take_lock
from argosy.control.shutdown import Shutdown
from argosy.errors import ArgosyError, HomeError
from argosy.protocol.facts import Note

if TYPE_CHECKING:
    from argosy.control.http import HttpApi
    from argosy.control.server import HttpServer

logger = logging.getLogger("argosy.controller")
_SUCCESSOR_SECONDS = 1.0
"""How long the agent may take to replace a dead keeper before the controller does."""
_REFUSAL_SECONDS = 10.0
_LOOK_SECONDS = 0.05


class Controller:
    """Everything of one controller process."""

    def __init__(self, cluster: Cluster, *, agent_wait_seconds: float = 20.0) -> None:
        self._cluster = cluster
        self._agent_wait_seconds = agent_wait_seconds
        self._stopped = asyncio.Event()
        self._trouble_since = 0.0

    async def run(
        self, control: socket.socket, http: socket.socket | None, tcp: socket.socket | None
    ) -> int:
        """Serve until told to end; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopped.set)
        began = time.monotonic()
        try:
            self._log = EventLog(self._cluster.events, on_trouble=self._set_trouble)
            self._conductor = Conductor(
                self._cluster, self._log, agent_wait_seconds=self._agent_wait_seconds
            )
            count = self._replay()
        except HomeError as error:
            logger.error("%s", error)
            await self._refuse(error, http)
            return error.exit_code
        self._conductor.expiry.begin()
        control.setblocking(False)
        agents = await asyncio.start_unix_server(self._conductor.serve, sock=control)
        logger.info("replayed %d events in %.3f s", count, time.monotonic() - began)
        keeper = read_json(self._cluster.keeper_json)
        watch = self._watch_keeper(keeper)
        shutdown = Shutdown(self._conductor)
        closers = [self._conductor.close, shutdown.close, agents.close]
        if http is not None or tcp is not None:
            closers[:0] = await self._serve_http(shutdown, http, tcp)
        stopped = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait((stopped, self._conductor.failed), return_when=asyncio.FIRST_COMPLETED)
        code = 0
        if self._conductor.failed.done():
            logger.error("memory is ahead of the log: %s", self._conductor.failed.exception())
            code = 70
        if watch is not None:
            watch.close()
        for close in closers:
            close()
        self._log.close()
        return code

    async def _refuse(self, error: HomeError, http: socket.socket | None) -> None:
        """Tell whoever asks why there is no controller, until somebody has touched the log: the next one may be able to read it."""
        from argosy.control.server import HttpServer, refusing

        server = HttpServer()
        if http is not None:
            await server.serve_local(refusing(error), http)
        before, deadline = self._seen_log(), time.monotonic() + _REFUSAL_SECONDS
        while self._seen_log() == before and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), _LOOK_SECONDS)
                break
        server.close()

    def _seen_log(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._cluster.events)
        except OSError:
            return (0, 0, 0)
        return (status.st_ino, status.st_size, status.st_mtime_ns)

    def _replay(self) -> int:
        # All of it stays: looking for garbage meanwhile, and in it ever after, would double the time.
        gc.disable()
        try:
            return self._conductor.replay()
        finally:
            gc.freeze()
            gc.enable()

    async def _serve_http(
        self, shutdown: Shutdown, http: socket.socket | None, tcp: socket.socket | None
    ) -> list[Callable[[], None]]:
        # Imported now and in a thread: agents are being served meanwhile.
        loop = asyncio.get_running_loop()
        api, server_class = await loop.run_in_executor(None, _import_http)
        port = tcp.getsockname()[1] if tcp is not None else None
        doors = api(self._conductor, shutdown, http_port=port)
        application = doors.application()
        server = server_class()
        if http is not None:
            await server.serve_local(application, http)
        if tcp is not None:
            try:
                await server.serve_tcp(application, tcp, self._cluster)
            except OSError as error:
                logger.error("the HTTP API is not served on TCP: %s", error)
        logger.info("serving, HTTP on port %s", port)
        return [doors.tied.close, server.close]

    def _set_trouble(self, text: str) -> None:
        if text:
            self._trouble_since = time.monotonic()
            logger.error("%s; nothing is decided until there is space again", text)
        else:
            seconds = time.monotonic() - self._trouble_since
            text = f"the event log could not be written for {seconds:.1f} s; nothing was lost"
            self._conductor.note(Note(level="warning", text=text))

    def _watch_keeper(self, keeper: dict[str, object]) -> LifeWatch | None:
        pid = keeper.get("pid")
        if not isinstance(pid, int):
            return None
        return LifeWatch(pid, lambda: self._keeper_died(keeper))

    def _keeper_died(self, keeper: dict[str, object]) -> None:
        logger.warning("keeper %s (pid %s) has died", keeper.get("keeper"), keeper.get("pid"))
        self._succession = asyncio.create_task(self._see_to_successor(keeper))

    async def _see_to_successor(self, keeper: dict[str, object]) -> None:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + _SUCCESSOR_SECONDS
        while self._is_kept_by(keeper) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._is_kept_by(keeper):
            logger.warning("nobody has replaced the keeper: doing it")
            held = self._conductor.blobs.hold_all()
            await loop.run_in_executor(None, _replace_keeper, self._cluster, held)
        self._stopped.set()

    def _is_kept_by(self, keeper: dict[str, object]) -> bool:
        return read_json(self._cluster.keeper_json).get("keeper") == keeper.get("keeper")


def _replace_keeper(cluster: Cluster, held: Held) -> None:
    from argosy.control.succession import replace_keeper

    try:
        replace_keeper(cluster, held)
    except (OSError, ArgosyError) as error:
        logger.error("a new keeper could not be started: %s", error)
    finally:
        held.close()


def _import_http() -> tuple[type[HttpApi], type[HttpServer]]:
    from argosy.control.http import HttpApi
    from argosy.control.server import HttpServer

    return HttpApi, HttpServer


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="argosy-controller")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--http-fd", type=int, default=-1)
    parser.add_argument("--http-tcp-fd", type=int, default=-1)
    parser.add_argument("--agent-wait-seconds", type=float, default=20.0)
    options = parser.parse_args()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(name)s[%(process)d] %(levelname)s %(message)s",
    )
    cluster = Cluster(options.directory, options.runtime)
    try:
        take_lock(cluster.lock("controller"), "controller")
        sockets = [
            socket.socket(fileno=number) if number >= 0 else None
            for number in (options.http_fd, options.http_tcp_fd)
        ]
        control = socket.socket(fileno=options.control_fd)
        controller = Controller(cluster, agent_wait_seconds=options.agent_wait_seconds)
        return asyncio.run(controller.run(control, *sockets))
    except ArgosyError as error:
        logger.error("%s", error)
        return error.exit_code
    except Exception:
        logger.exception("the controller failed")
        return 70


if __name__ == "__main__":
    # Threads that wait for a disk must not delay the end.
    code = main()
    logging.shutdown()
    os._exit(code)
