"""Frames on a unix stream socket: a 4-byte length and one JSON object, descriptors beside it.

A `Connection` never blocks: it buffers what cannot be written at once up to a limit and then drops the peer. Garbage, half
and oversized frames end that connection with an error frame where possible, and nothing else. A peer that has hung up is told
nothing any more, but what it said before is still read.
"""

from __future__ import annotations

import array
import base64
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from argosy.control.keeper.loop import READ, WRITE, Loop

VERSION = 1
MOST_AGENT_BYTES = 16 << 20
MOST_OTHER_BYTES = 1 << 20
MOST_DESCRIPTORS = 253
_READ_BYTES = 256 << 10
_LENGTH = struct.Struct(">I")
_ENCODER = json.JSONEncoder(separators=(",", ":"))

Message = dict[str, Any]


class FrameError(Exception):
    """The peer sent what is not a frame of this protocol."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def encode(message: Message) -> bytes:
    """The bytes of one frame."""
    body = _ENCODER.encode(message).encode()
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes in, objects out; raises FrameError on what cannot be a frame."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes as they came."""
        self.bytes += data

    def next(self) -> Message | None:
        """The next whole object, or None when more bytes are needed."""
        if len(self.bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self.bytes)
        if length > self.most_bytes:
            raise FrameError(
                f"a frame of {length} bytes is larger than the limit of {self.most_bytes}",
                "send smaller frames; is the other side of the same version?",
            )
        end = _LENGTH.size + length
        if len(self.bytes) < end:
            return None
        body = bytes(self.bytes[_LENGTH.size : end])
        del self.bytes[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise FrameError("a frame is not JSON", "send length-prefixed JSON objects") from None
        if not isinstance(message, dict):
            raise FrameError("a frame is not a JSON object", "send length-prefixed JSON objects")
        return message


class Connection:
    """One peer on a stream socket, watched by the loop."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        *,
        on_frame: Callable[[Connection, Message, list[int]], None],
        on_close: Callable[[Connection], None],
        most_bytes: int = MOST_OTHER_BYTES,
        most_queued_bytes: int = 4 << 20,
    ) -> None:
        sock.setblocking(False)
        self.loop = loop
        self.socket = sock
        self.on_frame = on_frame
        self.on_close = on_close
        self.on_bytes: Callable[[bytes], None] | None = None
        self.most_queued_bytes = most_queued_bytes
        self.is_closed = False
        self._buffer = FrameBuffer(most_bytes)
        self._descriptors: deque[int] = deque()
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._queued_bytes = 0
        self._is_closing = False
        self._is_deaf = False
        """The peer has hung up: nothing reaches it any more."""
        self._is_paused = False
        loop.watch(sock.fileno(), READ, self._ready)

    @property
    def most_bytes(self) -> int:
        """Largest frame taken from this peer."""
        return self._buffer.most_bytes

    @most_bytes.setter
    def most_bytes(self, value: int) -> None:
        self._buffer.most_bytes = value

    def send(self, message: Message, descriptors: list[int] | None = None) -> None:
        """Queue one frame; the descriptors stay the caller's."""
        self.send_bytes(encode(message), descriptors)

    def send_bytes(self, data: bytes, descriptors: list[int] | None = None) -> None:
        """Queue raw bytes; drops the peer when it has too many unread ones."""
        if self._is_mute():
            return
        view = memoryview(data)
        if not self._queue:
            sent = self._send_some(view, descriptors or [])
            if self._is_mute():
                return
            if sent:
                view, descriptors = view[sent:], None
        if not view:
            return
        try:
            copies = [os.dup(fd) for fd in descriptors or []]
        except OSError:
            # A peer that leaves so many descriptors unread is given up like one with too many bytes.
            self.close()
            return
        self._queue.append((view, copies))
        self._queued_bytes += len(view)
        if self._queued_bytes > self.most_queued_bytes:
            self.close()
            return
        self._rewatch()

    def fail(self, what: str, fix: str = "") -> None:
        """Say what is wrong, then close once that is written."""
        self.send({"type": "error", "what": what, "fix": fix})
        self.close_when_written()

    def close_when_written(self) -> None:
        """Read no more; close as soon as the queue is empty."""
        if self.is_closed:
            return
        self._is_closing = True
        if not self._queue:
            self.close()
        else:
            self._rewatch()

    def close(self) -> None:
        """End the connection and tell the owner, once."""
        if self.is_closed:
            return
        self.is_closed = True
        self.loop.forget(self.socket.fileno())
        self.socket.close()
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()
        self._drop_queue()
        self.on_close(self)

    def drain(self) -> None:
        """Take everything that has arrived, now; used when the peer is known to be dead."""
        waiting = b"?"
        while waiting and not (self.is_closed or self._is_closing):
            try:
                waiting = self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError:
                return
            self._receive()

    def pause(self) -> None:
        """Leave what the peer sends unread in the kernel, until `resume()`."""
        self._is_paused = True
        self._rewatch()

    def resume(self) -> None:
        """Read again."""
        self._is_paused = False
        self._rewatch()
        self.loop.soon(self._deliver)

    def to_state(self) -> Message | None:
        """What a successor program needs to go on; None if descriptors are in flight."""
        if self._descriptors or any(descriptors for _, descriptors in self._queue):
            return None
        return {
            "fd": self.socket.fileno(),
            "unread": base64.b64encode(bytes(self._buffer.bytes)).decode(),
            "unsent": base64.b64encode(b"".join(bytes(view) for view, _ in self._queue)).decode(),
        }

    def take_state(self, state: Message) -> None:
        """Go on where the predecessor stopped."""
        self._buffer.feed(base64.b64decode(state["unread"]))
        unsent = base64.b64decode(state["unsent"])
        if unsent:
            self.send_bytes(unsent)
        self.loop.soon(self._deliver)

    def _is_mute(self) -> bool:
        """Whether nothing is sent any more."""
        return self.is_closed or self._is_closing or self._is_deaf

    def _drop_queue(self) -> None:
        for _, descriptors in self._queue:
            for fd in descriptors:
                os.close(fd)
        self._queue.clear()
        self._queued_bytes = 0

    def _rewatch(self) -> None:
        if self.is_closed:
            return
        mask = 0 if self._is_closing or self._is_paused else READ
        if self._queue:
            mask |= WRITE
        self.loop.watch(self.socket.fileno(), mask, self._ready)

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush()
        if self.is_closed:
            return
        if self._is_closing or self._is_paused:
            # Unread bytes make no wakeup here, so this is a peer that hung up.
            if mask & ~WRITE:
                self.close()
            return
        if mask & ~WRITE:
            self._receive()

    def _receive(self) -> None:
        space = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(
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
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > 4 * MOST_DESCRIPTORS:
            self.fail("too many descriptors at once", f"send at most {MOST_DESCRIPTORS} per frame")
            return
        if self.on_bytes is not None:
            self.on_bytes(data)
            return
        self._buffer.feed(data)
        self._deliver()

    def _deliver(self) -> None:
        while not (self.is_closed or self._is_closing or self._is_paused):
            try:
                message = self._buffer.next()
                if message is None:
                    return
                descriptors = self._take_descriptors(message)
            except FrameError as error:
                self.fail(error.what, error.fix)
                return
            self.on_frame(self, message, descriptors)
            if self.on_bytes is not None:
                rest = bytes(self._buffer.bytes)
                self._buffer.bytes.clear()
                if rest:
                    self.on_bytes(rest)
                return

    def _take_descriptors(self, message: Message) -> list[int]:
        count = message.get("fds", 0)
        if not isinstance(count, int) or not 0 <= count <= len(self._descriptors):
            raise FrameError(
                f"a frame names {count!r} descriptors, {len(self._descriptors)} came with it",
                "send descriptors with the first byte of the frame that names them",
            )
        return [self._descriptors.popleft() for _ in range(count)]

    def _send_some(self, view: memoryview, descriptors: list[int]) -> int:
        try:
            if descriptors:
                rights = array.array("i", descriptors)
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                return self.socket.sendmsg([view], ancillary, socket.MSG_NOSIGNAL)
            return self.socket.send(view, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except (BrokenPipeError, ConnectionResetError):
            # What it said before it hung up is still to be read; the end of its stream closes this.
            self._is_deaf = True
            self._drop_queue()
            return 0
        except OSError:
            self.close()
            return 0

    def _flush(self) -> None:
        while self._queue:
            view, descriptors = self._queue[0]
            sent = self._send_some(view, descriptors)
            if self.is_closed:
                return
            if sent == 0:
                break
            for fd in descriptors:
                os.close(fd)
            self._queued_bytes -= sent
            if sent == len(view):
                self._queue.popleft()
            else:
                self._queue[0] = (view[sent:], [])
                break
        if self._is_closing and not self._queue:
            self.close()
            return
        self._rewatch()
