"""What the checkpointer and the process that uploads say to each other: one JSON object per line, over the process's stdin and stdout.

Both are of one installation. Options may hold credentials, which is why they come this way and not as arguments.
"""

from __future__ import annotations

import msgspec

from argosy.checkpoint.peers.settings import Copying
from argosy.checkpoint.tiers.settings import Objects


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The first line."""

    store: str
    run: str
    objects: Objects | None = None
    copying: Copying | None = None
    """One of them: where steps go."""


class Send(msgspec.Struct, frozen=True, kw_only=True, tag="send"):
    """Upload a step; answered by `Progress` and then `Uploaded` or `Failed`."""

    step: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far it is."""

    step: int
    num_bytes: int


class Uploaded(msgspec.Struct, frozen=True, kw_only=True, tag="uploaded"):
    """The step is committed in the object store, or in the memory of peers; all in bytes of plain files."""

    step: int
    sent_bytes: int
    found_bytes: int
    referred_bytes: int
    is_new: bool
    seconds: float
    removed: list[int] = []
    """Steps that the rules let go there."""
    trouble: str = ""
    """Why what the rules let go is still there."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It is given up; what was sent is found by the next attempt."""

    step: int
    kind: str
    what: str
    fix: str = ""


Order = Begin | Send
Answer = Progress | Uploaded | Failed

_ORDER: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_ANSWER: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_order(line: bytes) -> Order:
    """What the checkpointer says."""
    return _ORDER.decode(line)


def decode_answer(line: bytes) -> Answer:
    """What the process says."""
    return _ANSWER.decode(line)
