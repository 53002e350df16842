"""Checkpoints that a load has gone around, and the error when none is left: damage, or only something that was not given, like a key. No torch."""

from __future__ import annotations

import logging
from pathlib import Path

from argosy.checkpoint.signatures import NotTrusted
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError

_LOG = logging.getLogger("argosy.checkpoint")


class Refusals:
    """Of one load, the newest first."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._newest: ArgosyError | None = None

    def add(self, step: int, where: str, why: str, own: ArgosyError | None) -> None:
        """One that cannot be used; `own` is what this process met, if it is not another rank's."""
        if not self.texts:
            self._newest = own
        self.texts.append(f"step {step}: {why}")
        _LOG.warning("step %d of %s cannot be used: %s", step, where, why)

    def error(self, path: Path, step: int | None) -> ArgosyError:
        """None of them can be used: of a step, or of all."""
        newest = self._newest
        # What the newest lacks may be a key, and no bytes.
        is_damaged = not isinstance(newest, (ConfigError, NotTrusted))
        fix = "" if newest is None or is_damaged else newest.fix
        kind = ConfigError if isinstance(newest, ConfigError) else CheckpointDamaged
        what = "no checkpoint" if step is None else f"no copy of step {step}"
        return kind(
            f"{what} of {path} can be used; the newest: {self.texts[0]}",
            fix=f"{fix or 'get a copy from elsewhere'}; the state may be partly overwritten",
        )
