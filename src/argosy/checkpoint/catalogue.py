"""What a store holds, with its tensors: the listing of listings.py whose checkpoints can be looked into.

Who loads asks here which checkpoint to try next; who may delete is decided by retention.
"""

from __future__ import annotations

from argosy.checkpoint.listings import Listing, check_step
from argosy.checkpoint.opened import Opened


class Catalogue(Listing):
    """A store, seen from outside, with tensors."""

    def open(self, step: int) -> Opened:
        """A checkpoint; NotFoundError names those that are there."""
        opened = Opened(self.directory_of(step), files=self.files)
        check_step(opened, step)
        return opened
