"""The first thing that the ranks of a new group do: each says what it is, and learns who has come; an error names who never will.

Called by groups.py before Gloo connects anybody, since Gloo waits for its whole timeout and names nobody. Ranks of this host that have ended are known by
the groups made before this one (`remember`), and told at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
import weakref
from collections.abc import Iterator
from typing import Any

from argosy.errors import NoRoute, PeerLost, ProtocolError, TimedOut
from argosy.move import messages, segment, torchgroup
from argosy.move.locality import Locality

SPLIT = "ARGOSY_LOCALITY"
_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.001, 0.05
_LOST_SECONDS = 0.8
"""A connection may close a moment before its process has ended."""
_known: weakref.WeakSet[Locality] = weakref.WeakSet()
"""Localities of this process's groups, which name ranks as the program does."""


def remember(near: Locality) -> None:
    """These processes of the host are watched from now on, as long as the locality is open."""
    _known.add(near)


def gather(birth: torchgroup.Birth) -> list[dict[str, Any]]:
    """Everybody's card, by rank. Collective: returns when all ranks have come."""
    store = torchgroup.inner_store(birth.store, "arrivals")
    card = {
        "version": segment.VERSION,
        "native": int(segment.library() is not None),
        "split": os.environ.get(SPLIT, ""),
    }
    keys = [f"card{rank}" for rank in range(birth.size)]
    try:
        store.set(keys[birth.rank], json.dumps(card))
        _wait(store, keys, birth)
        cards = [json.loads(text) for text in store.multi_get(keys)]
    except RuntimeError as failure:  # torch's errors of a store
        raise _lost_among(birth, _LOST_SECONDS) or NoRoute(
            f"{_making(birth)}: its store does not answer: {failure}",
            fix="the process that serves it has ended: its own output says why (in a run: `argosy why`)",
        )
    for rank, other in enumerate(cards):
        if other["version"] != segment.VERSION:
            raise ProtocolError(
                f"rank {birth.ranks[rank]} speaks version {other['version']} of the collectives, "
                f"rank {birth.ranks[birth.rank]} {segment.VERSION}",
                fix="install one version of this package for all ranks",
            )
    return cards


@contextlib.contextmanager
def explaining(birth: torchgroup.Birth) -> Iterator[None]:
    """While Gloo connects the ranks: its errors become those of this package."""
    try:
        yield
    except RuntimeError as failure:
        raise _lost_among(birth, _LOST_SECONDS) or messages.explained(_making(birth), failure, None)


def _lost_among(birth: torchgroup.Birth, seconds: float = 0.0) -> PeerLost | None:
    """The error of a rank of the group that is known to have ended, or does so within a time."""
    watched = {
        pidfd: near.names[index]
        for near in list(_known)
        for index, pidfd in near.pidfds.items()
        if pidfd >= 0 and near.names[index] in birth.ranks
    }
    poller = select.poll()
    for pidfd in watched:
        poller.register(pidfd, select.POLLIN)
    ended = poller.poll(seconds * 1000) if watched else []
    return PeerLost(watched[ended[0][0]], _making(birth)) if ended else None


def _wait(store: torchgroup.Store, keys: list[str], birth: torchgroup.Birth) -> None:
    deadline = time.monotonic() + birth.timeout.total_seconds()
    pause = _FIRST_PAUSE_SECONDS
    while not store.check(keys):
        lost = _lost_among(birth)
        if lost is not None and not store.check([keys[birth.ranks.index(lost.rank)]]):
            raise lost
        if time.monotonic() >= deadline:
            missing = [birth.ranks[rank] for rank, key in enumerate(keys) if not store.check([key])]
            raise TimedOut(
                f"{_making(birth)}: ranks {', '.join(map(str, missing))} did not come in time",
                fix="all ranks of a group make it, all groups in the same order; see where they are (`argosy stacks`)",
            )
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE_SECONDS)


def _making(birth: torchgroup.Birth) -> str:
    return f"the making of group {birth.name}"
