"""Which ranks of a group share a host, by which path they talk, and the route that follows from it.

`settle` is collective: every rank of a new group calls it once. All ranks take the same path: native code only where every rank has
it. `ARGOSY_LOCALITY` may split a host further (ranks with different values are treated as on different hosts), never join two.
"""

from __future__ import annotations

import json
import os
import select
from typing import Any, Protocol

from argosy.errors import ArenaGone, ConfigError, PeerLost
from argosy.move import (
    arrivals,
    hostmemory,
    locality,
    mapping,
    segment,
    torchgroup,
    verdicts,
    waits,
)
from argosy.move.calls import Call
from argosy.move.nativeroute import NativeRoute
from argosy.move.soloroute import SoloRoute
from argosy.move.torchroute import TorchRoute
from argosy.native import loader

_SLOT_BYTES = (3 << 19) + hostmemory.PAGE
_SLOTS_BYTES = 16 << 20
"""A group of many ranks gets smaller slots."""

_SPIN_SECONDS = 60e-6

_most_local = 1
"""Ranks of this program on this host, as far as groups have shown: they compete for its cores."""


class Route(Protocol):
    """How calls of a group are carried out."""

    def run(self, call: Call, timeout_seconds: float) -> None:
        """Carry out one call; raises when it cannot."""

    def abort(self) -> None:
        """Make every rank leave what it waits for."""

    def close(self) -> None:
        """Let go of shared memory."""


class Host:
    """This process's place among the ranks of its host, and what must be given back at the end."""

    def __init__(self, groups: list[list[int]], rank: int, *, is_native: bool) -> None:
        self.groups = groups
        self.ranks = next(group for group in groups if rank in group)
        self.index = self.ranks.index(rank)
        self.is_native = is_native
        self.route: Route = SoloRoute()
        self.segment: segment.Segment | None = None
        self.near: locality.Locality | None = None

    def common_memory(self, size: int, timeout: float) -> mapping.Mapping:
        """New memory that all ranks of this host map. Collective on the host."""
        if self.near is None:
            raise ArenaGone("the group has been shut down")
        descriptor: int | None = None
        try:
            if self.near.is_leader:
                descriptor = os.memfd_create("argosy-common", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, size)
                hostmemory.reserve(descriptor, size, "shared buffers of a group")
                os.close(self.near.share(descriptor, timeout=timeout))
            else:
                descriptor = self.near.share(timeout=timeout)
            return mapping.Mapping(descriptor, size, is_private=False, is_prefaulted=True)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def lost_rank(self, seconds: float, rank: int | None = None) -> int | None:
        """A rank of this host (or only this one) that has ended or does so within a time; None when all live. The others are told.

        Of several the one that a rank has found first: those that leave because of it may have ended too by now.
        """
        first = self._first_lost()
        if first is not None and rank in (None, first):
            return first
        watched = self.near.watched() if self.near is not None else []
        by_descriptor = {
            pidfd: other
            for other, pidfd in zip(self.ranks, watched, strict=False)
            if pidfd >= 0 and rank in (None, other)
        }
        poller = select.poll()
        for pidfd in by_descriptor:
            poller.register(pidfd, select.POLLIN)
        ended = poller.poll(seconds * 1000) if by_descriptor else []
        if not ended:
            return None
        found = by_descriptor[ended[0][0]]
        if self.segment is not None:
            broken = self.segment.address + segment.BROKEN
            waits.break_off(waits.Peers((), broken=broken), self.ranks.index(found))
        return found

    def _first_lost(self) -> int | None:
        word = 0 if self.segment is None else self.segment.word(segment.BROKEN)
        if word >> segment.REASON_SHIFT != loader.PEER_LOST:
            return None
        return self.ranks[(word & ((1 << segment.REASON_SHIFT) - 1)) - 1]

    def close(self) -> None:
        """Give memory and descriptors back."""
        self.route.close()
        if self.segment is not None:
            self.segment.close()
        if self.near is not None:
            self.near.close()


def settle(birth: torchgroup.Birth, cards: list[dict[str, Any]]) -> Host:
    """Find the ranks of this host and open the memory that they share; `cards` are of arrivals.py."""
    global _most_local
    store = torchgroup.inner_store(birth.store, "argosy")
    is_native = all(card["native"] for card in cards)
    splits = sorted({card["split"] for card in cards})
    own = [rank for rank, card in enumerate(cards) if card["split"] == cards[birth.rank]["split"]]
    name = str(splits.index(cards[birth.rank]["split"]))
    near = _prove(torchgroup.inner_store(store, f"near{name}"), own, birth)
    try:
        groups = [[own[index] for index in group] for group in near.groups]
        if len(splits) > 1:
            groups = _all_groups(store, birth.rank == own[0], name, len(splits), groups)
        check_sizes(groups, birth.name)
        host = Host(groups, birth.rank, is_native=is_native)
        host.near = near
        _most_local = max(_most_local, len(host.ranks))
        if len(host.ranks) > 1:
            _open(host, near, birth)
    except BaseException:
        near.close()
        raise
    return host


def _prove(store: torchgroup.Store, own: list[int], birth: torchgroup.Birth) -> locality.Locality:
    """Which of these ranks share this host; it knows them by their places in the list."""
    timeout = birth.timeout.total_seconds()
    try:
        near = locality.prove(store, own.index(birth.rank), len(own), timeout=timeout)
    except PeerLost as lost:
        raise PeerLost(birth.ranks[own[lost.rank]], f"the making of group {birth.name}")
    near.names = [birth.ranks[rank] for rank in own]
    arrivals.remember(near)
    return near


def check_sizes(groups: list[list[int]], name: str) -> None:
    """Refuse a host with more ranks of a group than the segment has room for, on all ranks alike."""
    most = max(map(len, groups))
    if most > segment.MAX_RANKS:
        raise ConfigError(
            f"group {name} has {most} ranks on one host, of at most {segment.MAX_RANKS}",
            fix="use fewer ranks on a host, or another backend for this group",
        )


def _all_groups(
    store: torchgroup.Store, is_first: bool, name: str, num_splits: int, groups: list[list[int]]
) -> list[list[int]]:
    if is_first:
        store.set(f"groups{name}", json.dumps(groups))
    found = store.multi_get([f"groups{split}" for split in range(num_splits)])
    return sorted(group for text in found for group in json.loads(text))


def _open(host: Host, near: locality.Locality, birth: torchgroup.Birth) -> None:
    size, timeout = len(host.ranks), birth.timeout.total_seconds()
    if near.is_leader:
        slot_bytes = min(_SLOT_BYTES, _SLOTS_BYTES // size)
        opened = segment.Segment.create(size, slot_bytes, is_native=host.is_native)
        os.close(near.share(opened.descriptor, timeout=timeout))
    else:
        descriptor = near.share(timeout=timeout)
        opened = segment.Segment.open(descriptor, num_ranks=size, is_native=host.is_native)
    host.segment = opened
    names = [birth.ranks[rank] for rank in host.ranks]
    place = verdicts.Place(opened, host.index, names, birth.name)
    # With more ranks than cores whoever spins keeps the one it waits for from running.
    is_crowded = _most_local > len(os.sched_getaffinity(0))
    make = NativeRoute if host.is_native else TorchRoute
    host.route = make(place, near.watched(), spin_seconds=0.0 if is_crowded else _SPIN_SECONDS)
