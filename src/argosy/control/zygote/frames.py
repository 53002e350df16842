"""Frames between keeper and zygote: a 4-byte big-endian length, one JSON object, descriptors beside its first bytes.

Used by the zygote's loop alone. Reads exactly one frame at a time, so descriptors always belong to the frame they came with;
it never blocks in the middle of its own sends for longer than the keeper needs to read.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

MOST_FRAME_BYTES = 16 << 20
_MOST_DESCRIPTORS = 253  # the kernel's limit for one SCM_RIGHTS message
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other side sent bytes that are no frame; the stream cannot be trusted any further."""


class Channel:
    """One end of the stream socket to the keeper."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock

    def fileno(self) -> int:
        """Descriptor, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one frame, with descriptors beside its first byte."""
        body = json.dumps(message, separators=(",", ":")).encode()
        data = _LENGTH.pack(len(body)) + body
        if descriptors:
            rights = array.array("i", descriptors).tobytes()
            sent = self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            data = data[sent:]
        self._socket.sendall(data)

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for one frame and its descriptors; None when the keeper has closed its end."""
        descriptors: list[int] = []
        head = self._read(_LENGTH.size, descriptors)
        if not head:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MOST_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes, the limit is {MOST_FRAME_BYTES}")
        body = self._read(length, descriptors)
        try:
            message = json.loads(body)
        except ValueError as error:
            raise FrameError(f"a frame that is not JSON: {error}")
        if not isinstance(message, dict):
            raise FrameError("a frame that is not a JSON object")
        expected = message.get("fds", 0)
        if len(descriptors) != expected:
            for descriptor in descriptors:
                os.close(descriptor)
            raise FrameError(f"{len(descriptors)} descriptors came with a frame naming {expected}")
        return message, descriptors

    def _read(self, count: int, descriptors: list[int]) -> bytes:
        """Read exactly `count` bytes; empty only at a clean end before the first byte."""
        data = bytearray()
        room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        while len(data) < count:
            chunk, ancillary, _, _ = self._socket.recvmsg(
                count - len(data), room, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    numbers = array.array("i")
                    numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                    descriptors.extend(numbers)
            if not chunk:
                if not data:
                    return b""
                raise FrameError(f"the stream ended after {len(data)} of {count} bytes")
            data += chunk
        return bytes(data)
