"""What a checkpointer says of its saves: what happened to one, and how far it is. Heard by whoever gave a listener, in whatever thread; told by reports.py."""

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


_FAILED = {
    "failed": "was not saved",
    "upload_failed": "was not uploaded",
    "copy_failed": "was not copied to peers",
}


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


def describe(event: Event) -> tuple[Literal["warning", "info"], str] | None:
    """What those who look after a run are told of it, and how loudly; None: nothing."""
    wrong = _FAILED.get(event.what)
    if wrong is not None:
        return "warning", f"step {event.step} {wrong}: {event.detail}"
    if event.what not in ("durable", "uploaded", "copied"):
        return None
    more = f", {event.detail}" if event.detail else ""
    return "info", f"step {event.step} is {event.what} after {event.seconds:.2f} s{more}"
