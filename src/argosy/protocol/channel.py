"""The channel between controller and agent: typed messages in length-prefixed JSON frames over asyncio streams.

A frame is a 4-byte big-endian length and one JSON object. Whatever does not fit (too long, cut short, no JSON, another type,
another version) is a ProtocolError that says what was wrong; the caller closes the connection. It never retries and never buffers
without limit.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Generic, TypeVar

import msgspec

from argosy.errors import ProtocolError
from argosy.protocol.messages import (
    MOST_FRAME_BYTES,
    PROTOCOL_VERSION,
    FromAgent,
    FromController,
    Message,
)

T = TypeVar("T")
_HEADER = struct.Struct(">I")
_MOST_UNSENT_BYTES = 64 << 20


class Refused(Message, frozen=True, kw_only=True, tag="error"):
    """Last message before a connection is closed because of what came over it."""

    what: str
    fix: str = ""
    version: int = PROTOCOL_VERSION


class _Greeting(msgspec.Struct):
    """What any version's first message has: enough to tell versions apart before fields are checked."""

    version: int = 0


class Channel(Generic[T]):
    """One connection; `T` is what may come in."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        incoming: msgspec.json.Decoder[T],
        *,
        most_bytes: int = MOST_FRAME_BYTES,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = incoming
        self._encoder = msgspec.json.Encoder()
        self._most_bytes = most_bytes
        self._num_sent = 0
        self._num_received = 0

    async def receive(self) -> T | None:
        """The next message; None when the other side has closed between two frames."""
        body = await self._receive_body()
        return None if body is None else self._decode(body)

    async def receive_first(self) -> T | None:
        """The first message, its version checked before its fields: other versions may have others."""
        body = await self._receive_body()
        if body is None:
            return None
        try:
            greeting = msgspec.json.decode(body, type=_Greeting)
        except msgspec.DecodeError as error:
            raise _garbage(error) from None
        if greeting.version not in (0, PROTOCOL_VERSION):
            raise ProtocolError(
                f"the other side speaks version {greeting.version}, this one version {PROTOCOL_VERSION}",
                fix="use one version of Argosy on both sides: stop the cluster with `argosy down` and start it again",
            )
        return self._decode(body)

    def send(self, message: Message) -> None:
        """Queue a message; ProtocolError when it is too long or the other side reads nothing for far too long."""
        body = self._encoder.encode(message)
        if len(body) > self._most_bytes:
            raise ProtocolError(
                f"a message of {len(body)} bytes is over the limit of {self._most_bytes}",
                fix="make the run smaller: fewer processes per role, a smaller environment",
            )
        if self._writer.transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            raise ProtocolError("the other side does not read what it is sent")
        self._writer.write(_HEADER.pack(len(body)) + body)
        self._num_sent += 1

    def refuse(self, error: ProtocolError) -> None:
        """Say why, then close."""
        if not self._writer.is_closing():
            self.send(Refused(what=error.what, fix=error.fix))
        self.close()

    def close(self) -> None:
        """Close after what was queued has been sent."""
        self._writer.close()

    @property
    def is_closing(self) -> bool:
        """Whether sending has become pointless."""
        return self._writer.is_closing()

    def statistics(self) -> dict[str, int]:
        """Counts of messages."""
        return {"num_sent": self._num_sent, "num_received": self._num_received}

    async def _receive_body(self) -> bytes | None:
        try:
            header = await self._reader.readexactly(_HEADER.size)
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise ProtocolError(
                f"the connection ended after {len(error.partial)} of {_HEADER.size} bytes of a frame's length"
            ) from None
        except ConnectionError:
            return None
        (length,) = _HEADER.unpack(header)
        if length > self._most_bytes:
            raise ProtocolError(
                f"a frame of {length} bytes is over the limit of {self._most_bytes}",
                fix="only Argosy's own parts should connect here",
            )
        try:
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise ProtocolError(
                f"the connection ended after {len(error.partial)} of {length} bytes of a frame"
            ) from None
        except ConnectionError:
            return None

    def _decode(self, body: bytes) -> T:
        try:
            message = self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _garbage(error) from None
        self._num_received += 1
        return message


def controller_channel(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Channel[FromAgent]:
    """The controller's end."""
    return Channel(reader, writer, msgspec.json.Decoder(FromAgent))


def agent_channel(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Channel[FromController | Refused]:
    """The agent's end."""
    return Channel(reader, writer, msgspec.json.Decoder(FromController | Refused))


def _garbage(error: Exception) -> ProtocolError:
    return ProtocolError(
        f"a frame could not be read: {error}",
        fix="only Argosy's own parts, all of one version, should connect here",
    )
