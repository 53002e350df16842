"""Which checkpoint to load, and from where: the newest step of all; of one step the peers' copy before the disk's, the object store's last.

Peers that have another save of a step than the disk come behind everything else. The checkpointer tries the hops in their order until one proves
whole. An object store that another run uploads into, or that does not answer while the disk or peers have something, is gone around with a warning.
No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import msgspec

from argosy.checkpoint import manifests
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.peers.recalls import PeerListing
from argosy.checkpoint.tiers import claims
from argosy.checkpoint.tiers.remotes import RemoteListing
from argosy.checkpoint.tiers.settings import Objects
from argosy.checkpoint.turns import OtherStep, Turn
from argosy.errors import ArgosyError, HomeError, TimedOut

_LOG = logging.getLogger("argosy.checkpoint")
_PATIENCE_SECONDS = 120.0
Tier = Literal["peers", "disk", "objects"]
TIERS: tuple[Tier, ...] = get_args(Tier)
"""In the order in which copies of one step are tried."""


class Hop(msgspec.Struct, frozen=True):
    """A checkpoint that may be loaded."""

    step: int
    source: Tier = "disk"


class _Opening(msgspec.Struct, frozen=True, kw_only=True):
    """What each says before a load."""

    step: int | None
    hops: list[Hop]
    """Of the first alone."""

    @property
    def words(self) -> str:
        """For people."""
        return "the newest step" if self.step is None else f"step {self.step}"


def order(steps: Mapping[Tier, Sequence[int]], odd: Collection[int] = ()) -> list[Hop]:
    """Newest first, of equals by tier; of `odd` steps peers have another save than the disk, which is not to be preferred to it."""
    found = [Hop(step, tier) for tier in TIERS for step in steps.get(tier, ())]
    return sorted(found, key=lambda hop: (-hop.step, hop.source == "peers" and hop.step in odd))


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
        self._is_adoptable = False
        """Whether the store is new and may go on with the object store's prefix."""

    @property
    def is_disk_alone(self) -> bool:
        """Whether there is nothing else."""
        return self._remote is None and self._peers is None

    def hops(self, step: int | None = None) -> list[Hop]:
        """What to try, the best first: all steps, or the copies of one; the disk's is tried when there is none of that."""
        if self.is_disk_alone:
            return order({"disk": self._disk.steps()}) if step is None else [Hop(step)]
        steps: dict[Tier, Sequence[int]] = {"disk": self._disk.steps()}
        odd: list[int] = []
        if self._peers is not None:
            saves = self._peers.saves()
            steps["peers"] = sorted(saves)
            odd = [one for one in steps["disk"] if one in saves and self._differs(one, saves[one])]
        if self._remote is not None:
            steps["objects"] = self._in_objects(steps)
        found = order(steps, odd)
        if not found and self._peers is not None:
            self._peers.check_nothing_lost()
        if step is not None:
            found = [hop for hop in found if hop.step == step] or [Hop(step)]
        _LOG.info("to be tried, in this order: %s", ", ".join(map(self._words, found)) or "nothing")
        return found

    def agreed_hops(
        self, step: int | None, turn: Turn, *, is_first: bool, more_seconds: float
    ) -> list[Hop]:
        """As the first rank sees them, in all members of a group: a listing may differ from host to host. That rank may have waited for so long before."""
        opening = _Opening(step=step, hops=self.hops(step) if is_first else [])
        told = turn.agree(msgspec.json.encode(opening), more_seconds=more_seconds)
        said = [msgspec.json.decode(one, type=_Opening) for one in told]
        for rank, other in enumerate(said):
            if other.step != said[0].step:
                raise OtherStep(
                    f"rank {rank} loads {other.words}, rank 0 {said[0].words}",
                    fix="load the same step on all ranks",
                )
        return said[0].hops

    def listing_of(self, hop: Hop) -> Listing:
        """Where a hop leads."""
        if hop.source == "peers":
            assert self._peers is not None
            return self._peers
        return self._disk if hop.source == "disk" else self.remote

    def took(self, hop: Hop) -> None:
        """A state was loaded from there: a store without checkpoints of its own goes on with what it had in the object store."""
        if hop.source == "disk" or not self._is_adoptable or self._disk.steps():
            return
        try:
            claims.adopt(self.remote.bucket, self._disk.path)
        except ArgosyError as failure:
            if hop.source == "objects":
                raise
            _LOG.warning("nothing will be uploaded to %s: %s", self.remote.where, failure)

    @property
    def remote(self) -> RemoteListing:
        """The object store's listing."""
        assert self._remote is not None
        return self._remote

    def _in_objects(self, elsewhere: Mapping[Tier, Sequence[int]]) -> list[int]:
        self._is_adoptable = False
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
        self._is_adoptable = bool(steps) and not elsewhere["disk"]
        return steps

    def _differs(self, step: int, mark: int) -> bool:
        """Whether the disk has another save of a step than the one of this mark; one that cannot be told is no reason to prefer it."""
        try:
            with self._disk.folder(step) as folder:
                is_other = manifests.crc_of(folder.manifest_bytes) != mark
        except ArgosyError:
            return False
        if is_other:
            _LOG.warning("peers have another save of step %d than %s", step, self._disk.where)
        return is_other

    def _words(self, hop: Hop) -> str:
        return f"step {hop.step} of {self.listing_of(hop).where}"
