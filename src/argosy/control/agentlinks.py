"""AgentLinks: the controller's ends of the channels to its agents: who is connected, messages to them, questions and answers.

The conductor is told of every Hello and Report. Bad frames end their connection with an error message, and nothing else; a host that
connects again replaces its old connection.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from argosy.errors import ClusterError, ProtocolError
from argosy.protocol.channel import Channel, controller_channel
from argosy.protocol.messages import (
    PROTOCOL_VERSION,
    Answer,
    Ask,
    FromAgent,
    FromController,
    Hello,
    Report,
)

logger = logging.getLogger("argosy.controller")
_HELLO_SECONDS = 10.0
_CREDENTIALS = struct.Struct("3i")


class AgentLinks:
    """All connected agents, by host."""

    def __init__(
        self, on_message: Callable[[str, Hello | Report], None], on_left: Callable[[str], None]
    ) -> None:
        self._on_message = on_message
        self._on_left = on_left
        self._channels: dict[str, Channel[FromAgent]] = {}
        self._keepers: dict[str, tuple[int, str]] = {}
        self._agent_pids: dict[str, int] = {}
        self._connected = asyncio.Event()
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[str, asyncio.Future[Answer]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def hosts(self) -> list[str]:
        """Hosts whose agent is connected."""
        return list(self._channels)

    def keeper(self, host: str) -> tuple[int, str]:
        """(pid, id) of a host's keeper, as its agent last said."""
        return self._keepers.get(host, (0, ""))

    def agent_pid(self, host: str) -> int:
        """Pid of a host's agent; 0 when it is not connected from this machine."""
        return self._agent_pids.get(host, 0)

    async def wait_connected(self) -> None:
        """Return when at least one agent is connected."""
        await self._connected.wait()

    def send(self, host: str, message: FromController) -> None:
        """Send if the host is connected; what is lost is said again after its next Hello."""
        channel = self._channels.get(host)
        if channel is None or channel.is_closing:
            return
        try:
            channel.send(message)
        except ProtocolError as error:
            logger.error("host %s: %s", host, error.what)
            channel.close()

    async def ask(
        self, host: str, verb: str, data: dict[str, Any], *, timeout_seconds: float = 10.0
    ) -> dict[str, Any]:
        """Ask an agent; ClusterError when it says no, is not there or does not answer in time."""
        if host not in self._channels:
            raise ClusterError(
                f"the agent of host {host} is not connected", fix="try again in a moment"
            )
        number = next(self._ids)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = (host, future)
        try:
            self.send(host, Ask(id=number, verb=verb, data=data))
            answer = await asyncio.wait_for(future, timeout_seconds)
        except TimeoutError:
            raise ClusterError(
                f"the agent of host {host} did not answer `{verb}` in {timeout_seconds:.0f} s",
                fix="try again; `argosy status` shows whether it is alive",
            ) from None
        finally:
            self._asked.pop(number, None)
        if not answer.ok:
            raise ClusterError(answer.error or f"host {host} refused `{verb}`")
        return answer.data

    def tell(self, host: str, verb: str, data: dict[str, Any]) -> None:
        """Ask without waiting for an answer; at once, so it comes before whatever is asked later."""
        self.send(host, Ask(id=next(self._ids), verb=verb, data=data))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its Hello to its end."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        channel = controller_channel(reader, writer)
        host = ""
        try:
            pid = _check_peer(writer)
            hello = await asyncio.wait_for(channel.receive_first(), _HELLO_SECONDS)
            if hello is None:
                return
            if not isinstance(hello, Hello):
                raise ProtocolError("the first message of an agent must be a hello")
            if hello.version != PROTOCOL_VERSION:
                raise ProtocolError(
                    f"the agent speaks version {hello.version}, this controller {PROTOCOL_VERSION}"
                )
            host = hello.host
            self._enter(host, channel)
            self._agent_pids[host] = pid
            self._take(host, hello)
            while (message := await channel.receive()) is not None:
                self._take(host, message)
        except ProtocolError as error:
            logger.warning("closed a connection on the control socket: %s", error.what)
            channel.refuse(error)
        except TimeoutError:
            logger.warning("closed a connection that said no hello")
        except asyncio.CancelledError:
            # The controller ends; streams report a cancelled callback as an error otherwise.
            pass
        finally:
            channel.close()
            self._leave(host, channel)

    def close(self) -> None:
        """Close all connections."""
        for task in list(self._tasks):
            task.cancel()
        for channel in list(self._channels.values()):
            channel.close()

    def _enter(self, host: str, channel: Channel[FromAgent]) -> None:
        old = self._channels.get(host)
        if old is not None:
            self._leave(host, old)
            old.close()
        self._channels[host] = channel
        self._connected.set()
        logger.info("agent of host %s connected", host)

    def _leave(self, host: str, channel: Channel[FromAgent]) -> None:
        if self._channels.get(host) is not channel:
            return
        del self._channels[host]
        if not self._channels:
            self._connected.clear()
        for asked_host, future in list(self._asked.values()):
            if asked_host == host and not future.done():
                future.set_exception(ClusterError(f"the link to host {host} ended"))
        logger.info("agent of host %s disconnected", host)
        self._on_left(host)

    def _take(self, host: str, message: FromAgent) -> None:
        if isinstance(message, Answer):
            _, future = self._asked.get(message.id, ("", None))
            if future is not None and not future.done():
                future.set_result(message)
            return
        if message.host != host:
            raise ProtocolError(f"the agent of host {host} speaks for {message.host}")
        if isinstance(message, Hello):
            self._keepers[host] = (message.pid, message.keeper)
        self._on_message(host, message)


def _check_peer(writer: asyncio.StreamWriter) -> int:
    """The pid of the other side; ProtocolError when it is another user's."""
    sock: socket.socket = writer.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        return 0
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        raise ProtocolError(f"user {uid} may not connect here")
    return int(pid)
