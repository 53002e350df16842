"""What a store holds, with its tensors: the listing of listings.py whose checkpoints can be looked into.

Who loads asks here which checkpoint to try next; who may delete is decided by retention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from argosy.checkpoint import names, signatures
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.listings import Listing, check_step
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.trees import ValuesUnfit
from argosy.errors import CheckpointDamaged


class Catalogue(Listing):
    """A store, seen from outside, with tensors."""

    def __init__(self, path: Path | str, *, files: Files = FILES) -> None:
        super().__init__(path, files=files)
        self._keys: list[bytes] = []

    def trust(self, public_keys: Sequence[Path]) -> None:
        """Open only what was signed by one of these keys."""
        self._keys = [signatures.read_public(one) for one in public_keys]

    def mark_damaged(self, step: int, failure: CheckpointDamaged) -> None:
        """Note that a step was read and is not whole; one that may only be signed by somebody else, or be of another state, is not judged."""
        is_judged = not self._keys and not isinstance(failure, ValuesUnfit)
        if is_judged and (self.path / names.step_name(step)).exists():
            with contextlib.suppress(OSError):  # a store that can only be read
                (self.path / names.damaged_name(step)).touch()

    def open(self, step: int, source: Listing | None = None) -> Opened:
        """A checkpoint, of another listing when one is given; NotFoundError names those that are there."""
        listing = source or self
        opened = Opened(listing.place_of(step), files=listing.files)
        try:
            check_step(opened, step)
            if self._keys:
                signatures.check(opened, self._keys)
        except BaseException:
            opened.close()
            raise
        return opened
