"""What a checkpointer says of its saves: what happened to one, and how far it is. Heard by whoever gave a listener, in whatever thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

What = Literal[
    "requested",
    "staged",
    "durable",
    "uploaded",
    "copied",
    "failed",
    "upload_failed",
    "copy_failed",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a save."""

    what: What
    step: int
    seconds: float
    """Since it was requested."""
    detail: str = ""


Listener = Callable[[Event], None]


class Advance(msgspec.Struct, frozen=True, kw_only=True):
    """How far a save is."""

    step: int
    what: Literal["written", "uploaded", "copied"]
    num_bytes: int
    """On their way, by the last news."""
    total_bytes: int = 0
    """Of this process's share; 0: not known."""


Watcher = Callable[[Advance], None]
