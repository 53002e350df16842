"""What a run says about its object store: the address, how often, what stays, the key. Pure data, checked when it is made.

Given to the checkpointer; crosses to the process that uploads.
"""

from __future__ import annotations

import os

import msgspec

from argosy.checkpoint import retention
from argosy.checkpoint.retention import Keep
from argosy.errors import ConfigError

_SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "https", "file")


class _Address(msgspec.Struct, frozen=True):
    url: str
    """`s3://bucket/prefix`, `gs://…`, `az://…`, `file:///directory`."""


class Objects(_Address, frozen=True, kw_only=True):
    """An object store to which checkpoints are copied when they are durable, and from which they are loaded when the disk has none as new."""

    every: int = 1
    """Steps that it divides are uploaded."""
    every_seconds: float = 0.0
    """At least so long between two uploads."""
    keep: Keep | None = None
    """What stays there; everything unless told."""
    key: str = ""
    """The path of a file with 32 random bytes: everything is encrypted with it."""
    options: dict[str, str] = {}
    """For `obstore`: endpoint, region, access_key_id, …; what is not said is taken from the environment, as other programs of that store do."""
    bytes_per_second: float = 0.0
    """0 is as fast as the network takes it."""
    deadline_seconds: float = 3600.0
    """After which the upload of a step is given up."""
    files_at_once: int = 2
    raises: bool = False
    """An upload that failed is raised by the next call; otherwise it is only an event and a warning, and training never hears of it."""

    def __post_init__(self) -> None:
        # The process that uploads has another working directory.
        key = os.path.abspath(self.key) if self.key else ""
        msgspec.structs.force_setattr(self, "key", key)
        msgspec.structs.force_setattr(self, "url", self.url.rstrip("/"))
        if self.url.partition("://")[0] not in _SCHEMES:
            raise ConfigError(
                f"{self.url!r} is no address of an object store",
                fix="use s3://bucket/prefix, gs://…, az://… or file:///directory",
            )
        for name in ("every", "files_at_once"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}", fix="use a number from 1 up")
        for name in ("every_seconds", "bytes_per_second"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}", fix="use a number from 0 up")
        if not self.deadline_seconds > 0:
            raise ConfigError(f"deadline_seconds = {self.deadline_seconds}", fix="use seconds")
        if self.keep is not None:
            retention.check(self.keep)
            if self.keep.free_bytes:
                raise ConfigError(
                    "free_bytes means nothing in an object store, which is never full",
                    fix="use last, every, best or expire_seconds",
                )

    def __repr__(self) -> str:
        # Options may hold credentials.
        return f"Objects({self.url!r})"
