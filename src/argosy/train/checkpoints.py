"""When a trainer saves while it goes on, and what is kept: a value of its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from argosy.checkpoint import records, retention
from argosy.checkpoint.deliveries import Writing
from argosy.checkpoint.peers.settings import Peers
from argosy.checkpoint.retention import Keep
from argosy.checkpoint.tiers.settings import Objects
from argosy.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Every so many steps or seconds; with neither as often as loses least, by what saves cost and how often something fails."""

    every: int | None = None
    """Steps between saves."""
    seconds: float | None = None
    """Seconds between saves."""
    keep: Keep = dataclasses.field(default_factory=lambda: Keep(last=2))
    """Which of them stay."""
    writing: Writing = dataclasses.field(default_factory=Writing)
    """Threads and rate of the writing."""
    objects: Objects | None = None
    """An object store that they go to when they are durable, and are loaded from when the disk has none as new."""
    peers: Peers | None = None
    """Hosts into whose memory they are copied when they are durable, and from which a resume takes them before the disk."""
    attachments: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Small files beside the data, for other programs. A model's `config` that can `to_json_string()` is there as config.json without being named here."""

    def __post_init__(self) -> None:
        if self.every is not None and self.seconds is not None:
            raise ConfigError(
                "checkpoints by steps and by seconds", fix="give one of every= and seconds="
            )
        is_count = isinstance(self.every, int) and not isinstance(self.every, bool)
        if self.every is not None and not (is_count and self.every >= 1):
            raise ConfigError(f"checkpoints every {self.every} steps", fix="give 1 or more")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"checkpoints every {self.seconds} seconds", fix="give seconds")
        retention.check(self.keep)
        records.attached(self.attachments)


def attachments_of(policy: Checkpoints | None, model: object) -> dict[str, bytes]:
    """What lies beside the data of every save: the model's own config, as Hugging Face's models have one, and what is attached."""
    config = getattr(getattr(model, "config", None), "to_json_string", None)
    own = {"config.json": config().encode()} if callable(config) else {}
    return {**own, **(policy.attachments if policy is not None else {})}
