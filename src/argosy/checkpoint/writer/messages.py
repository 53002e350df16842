"""What ranks and the writer process say to each other over their socket, and how: a length, a message, and descriptors beside it.

Both are of one installation: another version is refused, not translated. Used by client.py and serving.py alone.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import TypeVar

import msgspec

from argosy.checkpoint.records import Outline
from argosy.checkpoint.shares import Duty
from argosy.errors import ProtocolError

VERSION = 5
_HEAD = struct.Struct("<QB")
_MOST_BYTES = 1 << 30
_MOST_DESCRIPTORS = 16

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A rank has come."""

    version: int
    pid: int


class Memory(msgspec.Struct, frozen=True, kw_only=True, tag="memory"):
    """The descriptor beside this is a slot, from now on known by a number; a number that is used again is another slot."""

    number: int


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    """The bytes lie in a slot, laid out by duties."""

    memory: int
    sequence: int
    places: list[int]


class Lent(msgspec.Struct, frozen=True, kw_only=True, tag="lent"):
    """The bytes lie in memory that is left as it is until the job is over: the first descriptors beside it."""

    memories: int
    """How many."""
    places: dict[str, tuple[int, int]]
    """By tensor: the number of its memory, and its first byte there."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """Blocks to be written, and how the save ends. Descriptors beside it, behind those of its memory, are locks: held until it is over, given up in their order."""

    number: int
    source: Staged | Lent
    duties: list[Duty]
    outline: Outline
    store: str
    staging: str
    rank: int
    size: int
    session: str
    seconds: float
    """For waiting for other ranks."""
    threads: int
    bytes_per_second: float
    """0: as fast as the disk takes it."""
    deadline_seconds: float
    is_incremental: bool


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """How far are all jobs, whoever has given them?"""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The writer's answer to a hello."""

    version: int
    pid: int


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """The writer has all it needs: the rank may die now."""

    number: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far a job is."""

    number: int
    num_bytes: int


class Doing(msgspec.Struct, frozen=True, kw_only=True, tag="doing"):
    """The jobs that are under way: of each its step, the bytes that are on their way, and all of them."""

    jobs: list[tuple[int, int, int]]


class Durable(msgspec.Struct, frozen=True, kw_only=True, tag="durable"):
    """The step is committed."""

    number: int
    crc32c: int | None
    """Of the manifest, from the one that committed."""
    seconds: float
    cpu_seconds: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The job is given up and cleared away."""

    number: int
    kind: str
    what: str
    fix: str = ""
    rank: int = -1
    """That was lost, if one was."""


Said = Hello | Memory | Job | Ask
Answer = Welcome | Accepted | Progress | Doing | Durable | Failed

_SAID: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(link: socket.socket, message: msgspec.Struct, *descriptors: int) -> None:
    """All of it; descriptors travel with the first byte."""
    data = msgspec.msgpack.encode(message)
    head = memoryview(_HEAD.pack(len(data), len(descriptors)))
    done = socket.send_fds(link, [head], list(descriptors)) if descriptors else link.send(head)
    link.sendall(head[done:])
    link.sendall(data)


def receive_said(link: socket.socket) -> tuple[Said, list[int]] | None:
    """What a rank says, and the descriptors, which are the caller's; None when it has gone."""
    found = _receive(link)
    return None if found is None else (_decoded(_SAID, found[0], found[1]), found[1])


def receive_answer(link: socket.socket) -> Answer | None:
    """What the writer says; None when it has gone."""
    found = _receive(link)
    return None if found is None else _decoded(_ANSWER, found[0], found[1])


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytearray, descriptors: list[int]) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as failure:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(f"a message that makes no sense: {failure}", fix="restart both sides")


def _receive(link: socket.socket) -> tuple[bytearray, list[int]] | None:
    head, descriptors = bytearray(), list[int]()
    try:
        while len(head) < _HEAD.size:
            piece, came, _, _ = socket.recv_fds(link, _HEAD.size - len(head), _MOST_DESCRIPTORS)
            descriptors += came
            if not piece:
                raise EOFError
            head += piece
        length, count = _HEAD.unpack(head)
        if length > _MOST_BYTES or count != len(descriptors):
            raise EOFError
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            done = link.recv_into(rest)
            if not done:
                raise EOFError
            rest = rest[done:]
    except (EOFError, ConnectionError):
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return data, descriptors
