"""What becomes of a durable step besides the disk: the object store and the peers, told and waited for together.

Each has an `Uploader` of its own, with its own interval. Called by the checkpointer. No torch.
"""

from __future__ import annotations

import time

from argosy.checkpoint.tiers.uploader import Uploader


class Senders:
    """Those that a checkpointer has."""

    def __init__(self, objects: Uploader | None, peers: Uploader | None) -> None:
        self._objects = objects
        self._all = [one for one in (objects, peers) if one is not None]

    def offer(self, step: int) -> None:
        """A step has become durable."""
        for one in self._all:
            one.offer(step)

    def offer_old(self, step: int) -> None:
        """The newest step of an earlier session may not have been uploaded; peers may have a newer one, for which it must not stand."""
        if self._objects is not None:
            self._objects.offer(step, is_old=True)

    def held(self) -> set[int]:
        """Steps that are still needed on disk."""
        return set().union(*(one.held() for one in self._all))

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is left to send."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for one in self._all:
            one.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def raise_failed(self) -> None:
        """By the policy of each."""
        for one in self._all:
            one.raise_failed()

    def close(self) -> None:
        """Nothing more comes; the processes finish what they have."""
        for one in self._all:
            one.close()
