"""What a run says about the memory of its hosts: who they are, by which scheme they keep for each other, how much and how often. Pure data, checked when made.

Given to the checkpointer; crosses to the process that copies.
"""

from __future__ import annotations

import msgspec

from argosy.checkpoint.peers import custody
from argosy.checkpoint.peers.custody import Scheme
from argosy.checkpoint.peers.labels import Share
from argosy.errors import ConfigError


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that keep each other's newest checkpoints in memory."""

    hosts: tuple[str, ...]
    """All of them, in the same order everywhere; neighbours are taken to fail together."""
    host: str
    """This one: the name of its place, which a replacement takes over."""
    scheme: Scheme = "buddy"
    group: int = 4
    """Hosts of a parity group, at least; fewer cost more memory and survive more."""
    run: str = ""
    """Whose checkpoints these are; the checkpointer's run or directory unless told."""
    every: int = 1
    """Steps that it divides are copied."""
    every_seconds: float = 0.0
    """At least so long between two copies."""
    keep: int = 2
    """Whole steps that stay in memory."""
    memory_bytes: int = 0
    """What this host gives; half of what is free when its holder starts unless told."""
    directory: str = ""
    """Where the sockets of the holders lie; the user's own unless told."""
    linger_seconds: float = 3600.0
    """How long a holder waits when nobody is there any more."""
    bytes_per_second: float = 0.0
    """0 is as fast as it goes."""
    deadline_seconds: float = 600.0
    """After which the copy of a step is given up."""
    patience_seconds: float = 30.0
    """For one answer of a holder, which may have to clear the memory for a part first."""
    raises: bool = False
    """A copy that failed is raised by the next call; otherwise it is only an event and a warning."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "hosts", tuple(self.hosts))
        if self.scheme not in ("buddy", "parity"):
            raise ConfigError(f"scheme = {self.scheme!r}", fix="use 'buddy' or 'parity'")
        custody.check(self.hosts, self.group_size)
        if self.host not in self.hosts:
            raise ConfigError(
                f"host {self.host!r} is not among {list(self.hosts)}", fix="name this host, too"
            )
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}", fix="use a number from 1 up")
        if self.group < 2:
            raise ConfigError(f"group = {self.group}", fix="use 2 hosts or more")
        for name in ("every_seconds", "bytes_per_second", "memory_bytes", "linger_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}", fix="use a number from 0 up")
        for name in ("deadline_seconds", "patience_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}", fix="use seconds")

    @property
    def group_size(self) -> int:
        """As the scheme wants it: all hosts when they are fewer than a group."""
        return 2 if self.scheme == "buddy" else max(2, min(self.group, len(self.hosts)))


class Copying(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that copies is told: whose checkpoints, and which part of each is this host's."""

    peers: Peers
    run: str
    share: Share
