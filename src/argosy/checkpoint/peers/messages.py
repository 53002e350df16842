"""What is said over the socket of a holder, and how: a length, a message, and bytes behind it where the message says so.

Both sides are of one installation. A put is answered block by block, so that what is wrong is told before more is sent. Used by unixroute.py and
serving.py alone.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from argosy.checkpoint.peers.labels import Address, Label
from argosy.checkpoint.processes import error_named
from argosy.errors import ArgosyError, ProtocolError

BLOCK_BYTES = 8 << 20
"""At most so many bytes go behind one message."""
_HEAD = struct.Struct("<I")
_MOST_BYTES = 64 << 20

T = TypeVar("T")


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """A stretch is coming; answered by `Ready` for each block that is to come, and by `Done`."""

    label: Label
    keep: int = 0
    """Whole steps that stay, by the run's own rule; 0: by the holder's."""


class Block(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """So many bytes of it are behind this."""

    num_bytes: int
    crc32c: int


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Bytes of a part or a parity; answered by `Block`."""

    address: Address
    start: int
    stop: int


class List(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """What there is of a run; answered by `Labels`."""

    run: str


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """An owner has gone back to this step: its newer ones go, and other saves of this one; answered by `Done`."""

    label: Label


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Let everything go and end; answered by `Done`."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The next block may come."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """It is carried out."""


class Labels(msgspec.Struct, frozen=True, kw_only=True, tag="labels"):
    """What there is."""

    labels: list[Label]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """It is not carried out."""

    kind: str
    what: str
    fix: str = ""


Said = Put | Block | Get | List | Forget | End
Answer = Ready | Done | Block | Labels | Refused

_SAID: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(link: socket.socket, message: Said | Answer, data: memoryview | None = None) -> None:
    """A message, and the bytes behind it."""
    encoded = msgspec.msgpack.encode(message)
    link.sendall(_HEAD.pack(len(encoded)) + encoded)
    if data is not None:
        link.sendall(data)


def receive_said(link: socket.socket) -> Said | None:
    """What a client says; None when it has gone."""
    return _received(link, _SAID)


def receive_answer(link: socket.socket) -> Answer | None:
    """What a holder says; None when it has gone."""
    return _received(link, _ANSWER)


def receive_into(link: socket.socket, into: memoryview) -> None:
    """The bytes behind a message; ConnectionError when they do not come."""
    while into:
        done = link.recv_into(into)
        if not done:
            raise ConnectionResetError("the other side has gone")
        into = into[done:]


def refusal_of(failure: ArgosyError) -> Refused:
    """An error as it crosses."""
    return Refused(kind=type(failure).__name__, what=failure.what, fix=failure.fix)


def error_of(refused: Refused, host: str) -> ArgosyError:
    """The same on the other side."""
    return error_named(refused.kind, f"the memory of {host}: {refused.what}", refused.fix)


def _received(link: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    head = bytearray(_HEAD.size)
    try:
        receive_into(link, memoryview(head))
        (length,) = _HEAD.unpack(head)
        if length > _MOST_BYTES:
            raise ProtocolError(f"a message of {length} bytes", fix="restart both sides")
        data = bytearray(length)
        receive_into(link, memoryview(data))
    except ConnectionError:
        return None
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as failure:
        raise ProtocolError(f"a message that makes no sense: {failure}", fix="restart both sides")
