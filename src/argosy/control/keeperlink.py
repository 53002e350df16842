"""KeeperLink: the agent's connection to its keeper, in asyncio, with descriptors beside the frames.

The agent sends frames and is given replies, events and the duplicates of arenas and blobs (`Held`) that it keeps for the day the
keeper dies. Frames are those of docs/reference/keeper-protocol.md. It never decides and never reconnects by itself.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from argosy.control.keeper.frames import (
    MOST_AGENT_BYTES,
    MOST_DESCRIPTORS,
    VERSION,
    FrameBuffer,
    FrameError,
    encode,
)
from argosy.errors import ClusterError, ProtocolError

Frame = dict[str, Any]
_FIRST_OWN_ID = 1 << 40
"""Ids of the link's own requests begin here, those of the decider's frames below."""
_READ_BYTES = 256 << 10
_MOST_UNSENT_BYTES = 64 << 20


class Held:
    """Duplicates of the keeper's arenas and blobs, by name; they outlive links and keepers."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], tuple[Frame, int]] = {}

    def hold(self, frame: Frame, descriptor: int) -> None:
        """Keep one; a newer one of that name takes its place."""
        key = (str(frame.get("kind")), str(frame.get("name")))
        old = self._held.pop(key, None)
        if old is not None:
            os.close(old[1])
        self._held[key] = (frame, descriptor)

    def drop(self, frame: Frame) -> None:
        """Close what the keeper has released, of either kind unless it says which."""
        kinds = [str(frame["kind"])] if "kind" in frame else ["arena", "blob"]
        for kind in kinds:
            old = self._held.pop((kind, str(frame.get("name"))), None)
            if old is not None:
                os.close(old[1])

    def read_blob(self, name: str) -> bytes | None:
        """The content of a blob held here; None when it is not."""
        found = self._held.get(("blob", name))
        if found is None:
            return None
        size = os.fstat(found[1]).st_size
        return os.pread(found[1], size, 0)

    def hand_over(self, sock: socket.socket) -> int:
        """Send everything to a new keeper, then the end mark; the count of what was sent."""
        for frame, descriptor in self._held.values():
            rights = array.array("i", [descriptor])
            data = encode({**frame, "type": "hold", "fds": 1})
            sent = sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            sock.sendall(data[sent:])
        sock.sendall(encode({"type": "end"}))
        return len(self._held)

    def close(self) -> None:
        """Let go of everything."""
        for _, descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)


class KeeperLink:
    """One connection to one keeper, after its welcome."""

    def __init__(self, sock: socket.socket, held: Held) -> None:
        self._socket = sock
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._buffer = FrameBuffer(MOST_AGENT_BYTES)
        self._descriptors: deque[int] = deque()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._ids = itertools.count(_FIRST_OWN_ID)
        self._requests: dict[int, asyncio.Future[Frame]] = {}
        self._is_closed = False
        self._greeted: asyncio.Future[Frame] = self._loop.create_future()
        self._on_frame: Callable[[Frame], None] | None = None
        self.keeper = ""
        self.pid = 0
        self.closed: asyncio.Future[None] = self._loop.create_future()
        """Done when the connection has ended."""

    @classmethod
    async def connect(cls, path: str, held: Held, *, timeout_seconds: float = 10.0) -> KeeperLink:
        """Connect and say hello; ClusterError when nobody answers, ProtocolError when refused."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.setblocking(False)
        link = cls(sock, held)
        try:
            await link._greet(path, timeout_seconds)
        except (OSError, TimeoutError) as error:
            link.close()
            raise ClusterError(
                f"the keeper at {path} does not answer: {str(error) or 'timeout'}",
                fix="`argosy down`, then `argosy up`",
            ) from None
        except ProtocolError:
            link.close()
            raise
        return link

    def start(self, on_frame: Callable[[Frame], None]) -> None:
        """Begin to deliver events and replies to requests that are not the link's own."""
        self._on_frame = on_frame
        self._deliver()

    def send(self, frame: Frame) -> None:
        """Queue a frame; a keeper that reads nothing for far too long is given up."""
        if self._is_closed:
            return
        data = memoryview(encode(frame))
        if not self._unsent:
            data = data[self._send_some(data) :]
        if data and not self._is_closed:
            self._unsent.append(data)
            self._unsent_bytes += len(data)
            if self._unsent_bytes > _MOST_UNSENT_BYTES:
                self.close()
                return
            self._loop.add_writer(self._socket.fileno(), self._flush)

    def tell(self, frame: Frame) -> None:
        """Send a request of the agent's own whose reply nobody needs."""
        self.send({**frame, "id": next(self._ids)})

    async def ask(self, frame: Frame, *, timeout_seconds: float = 10.0) -> Frame:
        """Send a request of the agent's own and wait for its reply; ClusterError when it says no or the link ends."""
        number = next(self._ids)
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._requests[number] = future
        try:
            self.send({**frame, "id": number})
            if self._is_closed:
                raise ClusterError("the link to the keeper has ended")
            reply = await asyncio.wait_for(future, timeout_seconds)
        except TimeoutError:
            raise ClusterError(
                f"the keeper did not answer {frame['type']!r} in {timeout_seconds:.0f} s"
            ) from None
        finally:
            self._requests.pop(number, None)
        if not reply.get("ok"):
            raise ClusterError(str(reply.get("error") or f"the keeper refused {frame['type']!r}"))
        return reply

    def close(self) -> None:
        """End the connection; whoever waits for a reply is told."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        for future in self._requests.values():
            if not future.done():
                future.set_exception(ClusterError("the link to the keeper has ended"))
        if not self.closed.done():
            self.closed.set_result(None)

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._is_closed

    async def _greet(self, path: str, timeout_seconds: float) -> None:
        async with asyncio.timeout(timeout_seconds):
            await self._loop.sock_connect(self._socket, path)
            hello = encode({"type": "hello", "version": VERSION, "as": "agent"})
            await self._loop.sock_sendall(self._socket, hello)
            self._loop.add_reader(self._socket.fileno(), self._receive)
            await asyncio.wait((self._greeted, self.closed), return_when=asyncio.FIRST_COMPLETED)
        if not self._greeted.done():
            raise ConnectionResetError("closed before its welcome")
        frame = self._greeted.result()
        if frame.get("type") != "welcome" or frame.get("version") != VERSION:
            raise ProtocolError(
                f"the keeper refused: {frame.get('what') or frame}",
                fix=str(frame.get("fix") or "`argosy down`, then `argosy up`"),
            )
        self.keeper = str(frame["keeper"])
        self.pid = int(frame["pid"])

    def _receive(self) -> None:
        space = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                _READ_BYTES, space, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if not data:
            self.close()
            return
        self._buffer.feed(data)
        self._deliver()

    def _deliver(self) -> None:
        # What follows the welcome waits in the buffer until `start()`.
        while not self._is_closed and (self._on_frame or not self._greeted.done()):
            try:
                frame = self._buffer.next()
            except FrameError:
                self.close()
                return
            if frame is None:
                return
            if self._on_frame is None:
                self._greeted.set_result(frame)
            else:
                self._take(frame, self._on_frame)

    def _take(self, frame: Frame, on_frame: Callable[[Frame], None]) -> None:
        kind = frame.get("type")
        if kind == "hold" and self._descriptors:
            self._held.hold(frame, self._descriptors.popleft())
            return
        if kind == "unhold":
            self._held.drop(frame)
            return
        number = frame.get("id")
        if kind == "reply" and isinstance(number, int) and number >= _FIRST_OWN_ID:
            future = self._requests.get(number)
            if future is not None and not future.done():
                future.set_result(frame)
            return
        on_frame(frame)

    def _send_some(self, data: memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self.close()
            return 0

    def _flush(self) -> None:
        while self._unsent:
            sent = self._send_some(self._unsent[0])
            if self._is_closed:
                return
            self._unsent_bytes -= sent
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._socket.fileno())
