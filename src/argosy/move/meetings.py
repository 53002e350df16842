"""Processes of one host that meet for a transfer: what each says of itself, their descriptors, and words to wait for each other.

Each hands over one memfd with its words and its introduction; nothing else travels, and nothing is left when they end. Every wait is bounded and
ends with `PeerLost` when the process waited for has died. Used by reshard; knows nothing of tensors.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from argosy.errors import NoRoute, PeerLost
from argosy.move import broker, handover, locality, regions, waits
from argosy.move.mapping import WORD_BYTES, Mapping
from argosy.move.proofs import Store

AGREED, ENTERED, DONE = range(3)
_AREA = 4096
_EXIT_MILLISECONDS = 1000
_AREAS = 2
"""A process is never more than one agreement ahead of another: two areas for what they say are enough."""
_TEXT = _AREA * (1 + _AREAS)


class Group(Protocol):
    """The part of a torch process group that is used here."""

    def rank(self) -> int:
        """This process's rank in the group."""

    def size(self) -> int:
        """How many there are."""

    def get_group_store(self) -> Store:
        """The store that the group was made with."""


class Meeting:
    """The processes of one group, all on this host; close it when the transfer is over."""

    def __init__(self, group: Group | None, timeout: float) -> None:
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
        self.timeout = timeout
        self._open = contextlib.ExitStack()
        self._pages: dict[int, Mapping] = {}
        self._agreed = 0
        if group is None or self.size == 1:
            self._locality = None
            return
        proven = locality.prove(group.get_group_store(), self.rank, self.size, timeout=timeout)
        self._locality = self._open.enter_context(proven)
        if len(proven.groups) > 1:
            other = next(rank for rank in range(self.size) if rank not in proven.group)
            why = proven.reasons.get(other, "its memory could not be proven to be shared")
            self.close()
            raise NoRoute(
                f"rank {self.rank} and rank {other} do not share memory: {why}",
                fix="reshard inside a host, with a group of its ranks; across hosts use a checkpoint or redistribute()",
            )
        self._watched = {
            rank: waits.Peers([pidfd], ranks=[rank]) for rank, pidfd in proven.pidfds.items()
        }

    def introduce(self, text: bytes) -> list[bytes]:
        """Say something to all, hear what all said, by rank."""
        if self._locality is None:
            return [text]
        page = broker.memfd("meeting", _TEXT + max(1, len(text)))
        try:
            os.pwrite(page, text, _TEXT)
            said = []
            for rank, descriptor in self._locality.share_all(page, timeout=self.timeout).items():
                try:
                    size = os.fstat(descriptor).st_size
                    self._pages[rank] = Mapping(
                        descriptor, size, is_private=False, is_prefaulted=False
                    )
                finally:
                    os.close(descriptor)
                said.append(bytes(self._pages[rank].memory[_TEXT:size]))
            return said
        finally:
            os.close(page)

    def hand_over(self, descriptors: Sequence[int], counts: Sequence[int]) -> dict[int, list[int]]:
        """Give all my descriptors to all others; theirs by rank, which belong to the caller. `counts` says how many each gives."""
        received: dict[int, list[int]] = {rank: [] for rank in range(self.size)}
        if self._locality is None:
            received[0] = [os.dup(descriptor) for descriptor in descriptors]
            return received
        spare = broker.memfd("spare", _AREA)
        try:
            for turn in range(max(counts, default=0)):
                mine = descriptors[turn] if turn < len(descriptors) else spare
                shared = self._locality.share_all(mine, timeout=self.timeout)
                for rank, descriptor in shared.items():
                    if turn < counts[rank]:
                        received[rank].append(descriptor)
                    else:
                        os.close(descriptor)
        except BaseException:
            handover.close_all(one for given in received.values() for one in given)
            raise
        finally:
            os.close(spare)
        return received

    def agree(self, text: bytes) -> list[bytes]:
        """Say a little more to all once all have come this far; the same as `introduce`, for at most 4 KB."""
        if self._locality is None:
            return [text]
        self._agreed += 1
        area = _AREA * (1 + self._agreed % _AREAS)
        memory = self._pages[self.rank].memory
        text = text[: _AREA - 4]
        memory[area : area + 4] = len(text).to_bytes(4, "little")
        memory[area + 4 : area + 4 + len(text)] = text
        self.post(AGREED, self._agreed)
        deadline = time.monotonic() + self.timeout
        said = []
        for rank in range(self.size):
            self.wait(AGREED, rank, self._agreed, deadline)
            memory = self._pages[rank].memory
            length = int.from_bytes(memory[area : area + 4], "little")
            said.append(bytes(memory[area + 4 : area + 4 + length]))
        return said

    def post(self, word: int, value: int) -> None:
        """Set one of my words."""
        if self._locality is not None:
            waits.post(self._pages[self.rank].address + word * WORD_BYTES, value)

    def wait(self, word: int, rank: int, value: int, deadline: float) -> None:
        """Wait until that rank's word has come to a value."""
        if self._locality is None or rank == self.rank:
            return
        address = self._pages[rank].address + word * WORD_BYTES
        what = f"a transfer in which rank {self.rank} waits for it"
        waits.wait(address, value, deadline=deadline, peers=self._watched[rank], what=what)

    def pid_of(self, rank: int) -> int:
        """The process number of a peer here; -1 when it has none."""
        if self._locality is None or rank == self.rank:
            return os.getpid()
        pidfd = self._locality.pidfds.get(rank, -1)
        return regions.pid_of(pidfd) if pidfd >= 0 else -1

    def check_alive(self, rank: int) -> None:
        """PeerLost when that process has ended, or ends within a second: its memory goes a moment before it does."""
        pidfd = -1 if self._locality is None else self._locality.pidfds.get(rank, -1)
        if pidfd < 0:
            return
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if poller.poll(_EXIT_MILLISECONDS):
            raise PeerLost(rank, "a transfer")

    def close(self) -> None:
        """Again is fine."""
        self._pages.clear()
        self._open.close()


def current_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, torch's default one, or None where torch.distributed is not initialised: then this process is alone."""
    if group is not None:
        return group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
