"""How the memory of hosts is reached: `Route` is all that the tier needs of it, by names of hosts.

On one machine it is a socket per pretended host (unixroute.py). A route over a network is another implementation of this and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from argosy.checkpoint.peers.labels import Address, Label

Fill = Callable[[int, memoryview], None]
"""Puts the bytes of a stretch from a place on, counted from its beginning, into memory."""


class Route(Protocol):
    """Checksummed stretches at hosts: put, got, listed and forgotten.

    Every call is bounded in time: PeerAbsent when nobody is there, TimedOut when who is there does not answer.
    """

    def start(self, host: str) -> None:
        """Have a holder at this host, which must be the caller's own; it lives on when the caller ends."""

    def put(self, host: str, label: Label, fill: Fill) -> int:
        """Have a stretch kept: all of it, or nothing is seen of it. Bytes that were sent; none when it was there."""

    def get(self, host: str, address: Address, start: int, into: memoryview) -> None:
        """Bytes that are still what was put; CheckpointDamaged otherwise."""

    def list(self, host: str, run: str) -> list[Label]:
        """What has come whole."""

    def forget(self, host: str, label: Label) -> None:
        """Let the owner's newer steps go, and other saves of this one."""

    def end(self, host: str) -> None:
        """Let everything go and end the holder; nothing when there is none."""

    def close(self) -> None:
        """Nothing more is asked."""
