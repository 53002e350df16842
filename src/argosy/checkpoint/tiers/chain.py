"""Which checkpoint to load, and from where: the newest step of all; of one step the disk's copy before the peers', the object store's last.

The checkpointer tries the hops in their order until one proves whole. An object store that another run uploads into, or that does not answer while
the disk or peers have something, is gone around with a warning. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from argosy.checkpoint.listings import Listing
from argosy.checkpoint.peers.recalls import PeerListing
from argosy.checkpoint.tiers import claims
from argosy.checkpoint.tiers.remotes import RemoteListing
from argosy.checkpoint.tiers.settings import Objects
from argosy.errors import HomeError, TimedOut

_LOG = logging.getLogger("argosy.checkpoint")
_PATIENCE_SECONDS = 120.0
Tier = Literal["disk", "peers", "objects"]
TIERS: tuple[Tier, ...] = get_args(Tier)


class Hop(msgspec.Struct, frozen=True):
    """A checkpoint that may be loaded."""

    step: int
    source: Tier = "disk"


def order(steps: Mapping[Tier, Sequence[int]]) -> list[Hop]:
    """Newest first; of equals the tier that costs others least."""
    found = [Hop(step, tier) for tier in TIERS for step in steps.get(tier, ())]
    return sorted(found, key=lambda hop: -hop.step)


class Chain:
    """The places of a run's checkpoints."""

    def __init__(
        self, disk: Listing, objects: Objects | None, peers: PeerListing | None = None
    ) -> None:
        self._disk = disk
        self._peers = peers
        # At once: an address, a key or a package that cannot be used is refused before anything begins. Nothing is asked yet.
        self._remote = (
            None
            if objects is None
            else RemoteListing.of(objects, patience_seconds=_PATIENCE_SECONDS)
        )

    @property
    def is_disk_alone(self) -> bool:
        """Whether there is nothing else."""
        return self._remote is None and self._peers is None

    def hops(self, step: int | None = None) -> list[Hop]:
        """What to try, the best first: all steps, or the copies of one; the disk's is tried when there is none of that."""
        if self.is_disk_alone:
            return order({"disk": self._disk.steps()}) if step is None else [Hop(step)]
        steps: dict[Tier, Sequence[int]] = {"disk": self._disk.steps()}
        if self._peers is not None:
            steps["peers"] = self._peers.steps()
        if self._remote is not None:
            steps["objects"] = self._in_objects(steps)
        found = order(steps)
        if not found and self._peers is not None:
            self._peers.check_nothing_lost()
        if step is None:
            return found
        return [hop for hop in found if hop.step == step] or [Hop(step)]

    def listing_of(self, hop: Hop) -> Listing:
        """Where a hop leads."""
        if hop.source == "peers":
            assert self._peers is not None
            return self._peers
        return self._disk if hop.source == "disk" else self.remote

    def took(self, hop: Hop) -> None:
        """A state was loaded from there: a store without checkpoints of its own goes on with that prefix."""
        if hop.source == "objects" and not self._disk.steps():
            claims.adopt(self.remote.bucket, self._disk.path)

    @property
    def remote(self) -> RemoteListing:
        """The object store's listing."""
        assert self._remote is not None
        return self._remote

    def _in_objects(self, elsewhere: Mapping[Tier, Sequence[int]]) -> list[int]:
        try:
            steps = self.remote.steps()
            owner = ""
            if steps:
                owner = claims.owner_if_foreign(
                    self.remote.bucket, self._disk.path, has_steps=bool(elsewhere["disk"])
                )
        except (TimedOut, HomeError) as failure:
            if not any(elsewhere.values()):
                # Nothing is known: to begin anew would be to forget what may be there.
                raise
            _LOG.warning("what lies in the object store is not known: %s", failure)
            return []
        if owner:
            _LOG.warning("%s is not loaded from: it belongs to %s", self.remote.where, owner)
            return []
        return steps
