"""Processes of one host that meet for a transfer: what each says of itself, their descriptors, and words to wait for each other.

Each hands over one memfd with its words and its introduction; nothing else travels, and nothing is left when they end. Every wait is bounded and
ends with `PeerLost` when the process waited for has died. Used by reshard; knows nothing of tensors.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch.distributed as dist

from argosy.errors import (
    ArgosyError,
    ClusterError,
    ConfigError,
    NoRoom,
    NoRoute,
    PeerLost,
    ProtocolError,
    TimedOut,
)
from argosy.move import broker, handover, locality, regions, waits
from argosy.move.mapping import WORD_BYTES, Mapping
from argosy.move.proofs import Store
from argosy.native import loader

AGREED, ENTERED, DONE, BROKEN = range(4)
_BROKEN_KEY = "argosy/meetings/broken"
_LEFT = 7
"""In the broken word: its rank has left for another reason than a lost or late one."""
_ONE_SIDED = (TimedOut, PeerLost, ProtocolError, ClusterError, NoRoom)
"""What one rank may raise while the others go on; any other ArgosyError of a preparation is raised by all."""
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
        self._locality: locality.Locality | None = None
        self._store: Store | None = None
        self._reason = ""
        if group is None or self.size == 1:
            return
        self._store = group.get_group_store()
        self.check_usable()
        try:
            proven = locality.prove(self._store, self.rank, self.size, timeout=timeout)
        except BaseException as failure:
            self.break_off(failure)
            raise
        self._locality = self._open.enter_context(proven)
        if len(proven.groups) > 1:
            other = next(rank for rank in range(self.size) if rank not in proven.group)
            why = proven.reasons.get(other, "its memory could not be proven to be shared")
            self.close()
            raise NoRoute(
                f"rank {self.rank} and rank {other} do not share memory: {why}",
                fix="reshard inside a host, with a group of its ranks; across hosts use a checkpoint or redistribute()",
            )
        self._watched: dict[int, waits.Peers] = {}

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
            self._watched = {
                rank: waits.Peers([pidfd], ranks=[rank], broken=self._word(BROKEN, rank))
                for rank, pidfd in self._locality.pidfds.items()
            }
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
            waits.post(self._word(word, self.rank), value)

    def wait(self, word: int, rank: int, value: int, deadline: float) -> None:
        """Wait until that rank's word has come to a value."""
        if self._locality is None or rank == self.rank:
            return
        what = f"a transfer in which rank {self.rank} waits for it"
        try:
            waits.wait(
                self._word(word, rank),
                value,
                deadline=deadline,
                peers=self._watched[rank],
                what=what,
            )
        except PeerLost as lost:
            if lost.rank == rank and waits.peek(self._word(BROKEN, rank)):
                self.check_usable()
            raise

    def _word(self, word: int, rank: int) -> int:
        return self._pages[rank].address + word * WORD_BYTES

    def check_usable(self) -> None:
        """ConfigError when a rank has left a transfer of this group in the middle: the others may be anywhere in it."""
        if self._store is not None and not self._reason and self._store.check([_BROKEN_KEY]):
            self._reason = self._store.get(_BROKEN_KEY).decode()
        if self._reason:
            raise ConfigError(
                f"no transfer is possible in this group any more: {self._reason}",
                fix="on all ranks that are left: close the transfer, make a new group (dist.new_group) and prepare it there",
            )

    def break_off(self, failure: BaseException) -> None:
        """This rank leaves in the middle: nobody may wait for it, and nobody may begin anything else in this group."""
        if self._store is None or self._reason:
            return
        said = failure.what if isinstance(failure, ArgosyError) else repr(failure)
        self._reason = f"rank {self.rank} has left a transfer: {said}"
        # A store whose host has ended cannot be told, and does not need to be.
        with contextlib.suppress(RuntimeError):
            self._store.set(_BROKEN_KEY, self._reason)
        if self.rank in self._pages:
            peers = waits.Peers((), broken=self._word(BROKEN, self.rank))
            if isinstance(failure, PeerLost):
                waits.break_off(peers, failure.rank)
            elif isinstance(failure, TimedOut):
                waits.break_off(peers, self.rank, loader.TIMEOUT)
            else:
                waits.break_off(peers, self.rank, _LEFT)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A part of a transfer in which a failure is this rank's alone."""
        self.check_usable()
        try:
            yield
        except BaseException as failure:
            self.break_off(failure)
            raise

    def pid_of(self, rank: int) -> int:
        """The process number of a peer here; -1 when it has none."""
        if self._locality is None or rank == self.rank:
            return os.getpid()
        pidfd = self._locality.pidfds.get(rank, -1)
        return regions.pid_of(pidfd) if pidfd >= 0 else -1

    def check_alive(self, rank: int, milliseconds: int = _EXIT_MILLISECONDS) -> None:
        """PeerLost when that process has ended, or ends within a second: its memory goes a moment before it does."""
        pidfd = -1 if self._locality is None else self._locality.pidfds.get(rank, -1)
        if pidfd < 0:
            return
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if poller.poll(milliseconds):
            raise PeerLost(rank, "a transfer")

    def close(self) -> None:
        """Again is fine."""
        self._pages.clear()
        self._open.close()


def is_one_sided(failure: BaseException) -> bool:
    """Whether the other ranks may have gone on where this one has failed."""
    return isinstance(failure, _ONE_SIDED) or not isinstance(failure, ArgosyError)


def current_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, torch's default one, or None where torch.distributed is not initialised: then this process is alone."""
    if group is not None:
        return group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
