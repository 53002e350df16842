"""The memory of a holder: parts of other hosts' checkpoints and parities, in memfds, with a checksum of every chunk.

What comes is seen when all of it has come and was right; a stretch that is to be folded is added into the parity of its group then. Newer steps
replace older ones, within a limit of bytes; runs that nobody uses make room for others. Knows no sockets; the holder's threads call it.
"""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from argosy.checkpoint import checksums
from argosy.checkpoint.peers import rooms
from argosy.checkpoint.peers.labels import CHUNK_BYTES, Address, Label
from argosy.checkpoint.peers.rooms import Series, Standing
from argosy.errors import CheckpointDamaged, NoRoom, NotFoundError
from argosy.move import broker, hostmemory


class Memory:
    """Shared memory in whole chunks, zeros behind the last byte; it ends with its last user."""

    def __init__(self, num_bytes: int, what: str) -> None:
        size = padded(num_bytes)
        self.descriptor = broker.memfd(what, size)
        try:
            hostmemory.reserve(self.descriptor, size, what)
            self.view = memoryview(mmap.mmap(self.descriptor, size))
        except BaseException:
            os.close(self.descriptor)
            raise
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.view, dtype=np.uint8)
        self.table = np.full(size // CHUNK_BYTES, checksums.of_zeros(CHUNK_BYTES), dtype=np.uint32)

    def sum_up(self, start: int, stop: int) -> None:
        """Note the checksums of chunks that have come."""
        first, last = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        self.table[first:last] = self._sums(first, last)

    def checked(self, start: int, stop: int) -> memoryview:
        """A stretch, when all of its chunks are still what came."""
        first, last = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        wrong = np.flatnonzero(self._sums(first, last) != self.table[first:last])
        if len(wrong):
            at = (first + int(wrong[0])) * CHUNK_BYTES
            raise CheckpointDamaged(f"bytes {at} to {at + CHUNK_BYTES} have changed in memory")
        return self.view[start:stop]

    def fold(self, other: Memory) -> None:
        """Exclusive or with memory that is not longer; the checksums follow without a look at the bytes, so that damage is not blessed."""
        for start in range(0, len(other.bytes), CHUNK_BYTES):
            mine = self.bytes[start : start + CHUNK_BYTES]
            np.bitwise_xor(mine, other.bytes[start : start + CHUNK_BYTES], out=mine)
        self.table[: len(other.table)] ^= other.table ^ np.uint32(checksums.of_zeros(CHUNK_BYTES))

    def _sums(self, first: int, last: int) -> checksums.Table:
        address = self.bytes.ctypes.data + first * CHUNK_BYTES
        return checksums.of_chunks(address, (last - first) * CHUNK_BYTES, CHUNK_BYTES)

    def __len__(self) -> int:
        return len(self.bytes)

    def __del__(self) -> None:
        if hasattr(self, "table"):
            os.close(self.descriptor)


class Incoming:
    """A stretch on its way; nobody sees it."""

    memory: Memory

    def __init__(self, label: Label, keep: int) -> None:
        self.label = label
        self.keep = keep
        self.num_bytes = 0

    def room(self, num_bytes: int) -> memoryview:
        """Where the next bytes go."""
        if num_bytes <= 0 or self.num_bytes + num_bytes > self.label.num_bytes:
            raise CheckpointDamaged(f"{self.num_bytes + num_bytes} bytes have come, too many")
        return self.memory.view[self.num_bytes : self.num_bytes + num_bytes]

    def took(self, num_bytes: int, crc32c: int) -> None:
        """They have come: CheckpointDamaged when they are not those that were sent."""
        found = checksums.of_bytes(self.room(num_bytes))
        if found != crc32c:
            raise CheckpointDamaged(f"bytes {self.num_bytes} onwards were changed on the way")
        self.memory.sum_up(self.num_bytes, self.num_bytes + num_bytes)
        self.num_bytes += num_bytes


class _Kept:
    """One step of a series."""

    def __init__(self) -> None:
        self.wholes: dict[str, tuple[Label, Memory]] = {}
        self.folded: dict[str, Label] = {}
        self.parity: Memory | None = None

    def labels(self) -> list[Label]:
        return [*(label for label, _ in self.wholes.values()), *self.folded.values()]

    def num_bytes(self) -> int:
        parity = 0 if self.parity is None else len(self.parity)
        return parity + sum(len(memory) for _, memory in self.wholes.values())

    def forget(self, owner: str) -> None:
        """Take back what is of an owner; a parity cannot be kept without one of its stretches."""
        self.wholes.pop(owner, None)
        if owner in self.folded:
            self.folded.clear()
            self.parity = None

    def put(self, label: Label, memory: Memory) -> None:
        self.forget(label.owner)
        if not label.is_folded:
            self.wholes[label.owner] = label, memory
            return
        self.folded[label.owner] = label
        if self.parity is None:
            self.parity = memory
            return
        # Into the longer one: there is never a third piece of memory.
        longer, shorter = sorted((self.parity, memory), key=len, reverse=True)
        longer.fold(shorter)
        self.parity = longer


class Shelves:
    """Everything that a holder has."""

    def __init__(self, *, most_bytes: int, keep: int) -> None:
        self._most_bytes = most_bytes
        self._keep = keep
        self._lock = threading.Lock()
        self._kept: dict[Series, dict[int, _Kept]] = {}
        """The series that was put least recently first."""
        self._coming: list[Incoming] = []
        self._users: dict[int, str] = {}
        """Who is here now, and for which run."""

    def begin(self, label: Label, keep: int = 0) -> Incoming | None:
        """Room for a stretch, taken now; None when it is there. Whoever puts a step has gone back behind its newer ones: they go.

        `keep` is how many whole steps its run wants to stay; 0 leaves that to the holder.
        """
        with self._lock:
            self._forget_newer(label)
            if label in self._labels():
                return None
            self._make_room(label)
            incoming = Incoming(label, keep or self._keep)
            self._coming.append(incoming)
        try:
            # Not under the lock: the kernel clears every page.
            incoming.memory = Memory(label.num_bytes, f"step {label.step} of {label.owner}")
        except BaseException:
            self.give_up(incoming)
            raise
        return incoming

    def finish(self, incoming: Incoming) -> None:
        """All has come: from now on it is seen."""
        label = incoming.label
        if incoming.num_bytes != label.num_bytes:
            raise CheckpointDamaged(
                f"{incoming.num_bytes} bytes have come instead of {label.num_bytes}"
            )
        with self._lock:
            self._coming.remove(incoming)
            if label in self._labels():
                return  # somebody else has put it meanwhile; into a parity it must not come twice
            key = label.run, label.members
            series = self._kept[key] = self._kept.pop(key, {})  # behind all others
            series.setdefault(label.step, _Kept()).put(label, incoming.memory)
            self._tidy(label, incoming.keep)

    def give_up(self, incoming: Incoming) -> None:
        """The rest does not come."""
        with self._lock:
            if incoming in self._coming:
                self._coming.remove(incoming)

    def labels(self, run: str) -> list[Label]:
        """What there is of a run."""
        with self._lock:
            return [label for label in self._labels() if label.run == run]

    def memory_of(self, address: Address) -> Memory:
        """An owner's part, or a parity once all members' stretches are in it; neither changes any more."""
        with self._lock:
            kept = self._kept.get((address.run, address.members), {}).get(address.step)
            if kept is not None and address.owner in kept.wholes:
                return kept.wholes[address.owner][1]
            if kept is not None and not address.owner:
                parity, missing = kept.parity, len(address.members) - 1 - len(kept.folded)
                if parity is not None and not missing:
                    return parity
        what = f"the part of {address.owner}" if address.owner else "the parity"
        raise NotFoundError(f"{what} of step {address.step} is not here")

    def forget_newer(self, label: Label) -> None:
        """Let go of what its owner has put of newer steps, and of other saves of this one."""
        with self._lock:
            self._forget_newer(label)

    def note_user(self, user: int, run: str) -> None:
        """Somebody is here for a run, until they are gone: its newest steps go for no other's."""
        with self._lock:
            self._users[user] = run

    def note_gone(self, user: int) -> None:
        """They are."""
        with self._lock:
            self._users.pop(user, None)

    def statistics(self) -> dict[str, int]:
        """How full it is."""
        with self._lock:
            return {
                "num_bytes": self._num_bytes(),
                "most_bytes": self._most_bytes,
                "steps": sum(len(series) for series in self._kept.values()),
                "coming": len(self._coming),
            }

    def _labels(self) -> list[Label]:
        return [
            label
            for series in self._kept.values()
            for kept in series.values()
            for label in kept.labels()
        ]

    def _num_bytes(self) -> int:
        kept = sum(one.num_bytes() for series in self._kept.values() for one in series.values())
        return kept + sum(padded(one.label.num_bytes) for one in self._coming)

    def _forget_newer(self, label: Label) -> None:
        for one in self._labels():
            is_own = (one.run, one.owner) == (label.run, label.owner)
            is_other_save = one.step == label.step and one.image != label.image
            if is_own and (one.step > label.step or is_other_save):
                self._kept[one.run, one.members][one.step].forget(one.owner)
        self._sweep()

    def _make_room(self, label: Label) -> None:
        """All that must go for it, or nothing."""
        needed, free = padded(label.num_bytes), self._most_bytes - self._num_bytes()
        going = []
        for key, step in self._may_go(label):
            if free >= needed:
                break
            free += self._kept[key][step].num_bytes()
            going.append((key, step))
        if free < needed:
            raise NoRoom(
                f"step {label.step} of {label.owner} needs {needed} bytes, {max(0, free)} can be had",
                fix=f"end the holder there, process {os.getpid()}: the next one takes what Peers(memory_bytes=…) says then",
            )
        for key, step in going:
            del self._kept[key][step]
        self._sweep()

    def _may_go(self, label: Label) -> list[tuple[Series, int]]:
        """Steps, in the order in which they go: of the same members, then of others."""
        own = label.run, label.members
        others = {key: _standing(one, key[1]) for key, one in self._kept.items()}
        mine = rooms.plan_shedding(others.pop(own, []), label.step)
        used = {*self._users.values(), label.run}
        return [*((own, step) for step in mine), *rooms.plan_yielding(others, used)]

    def _tidy(self, label: Label, keep: int) -> None:
        """After a stretch has come: what newer whole steps have made useless goes, of former groups of the members too."""
        series = self._kept[label.run, label.members]
        for step in rooms.plan_surplus(_standing(series, label.members), keep):
            del series[step]
        if label.step in series and _is_whole(series[label.step], label.members):
            for (run, members), other in self._kept.items():
                is_former = run == label.run and members != label.members
                if is_former and not set(members).isdisjoint(label.members):
                    for step in [one for one in other if one < label.step]:
                        del other[step]
        self._sweep()

    def _sweep(self) -> None:
        for series in self._kept.values():
            for step in [step for step, kept in series.items() if not kept.labels()]:
                del series[step]
        self._kept = {key: series for key, series in self._kept.items() if series}


def padded(num_bytes: int) -> int:
    """To whole chunks, one at least."""
    return max(1, -(-num_bytes // CHUNK_BYTES)) * CHUNK_BYTES


def _is_whole(kept: _Kept, members: tuple[str, ...]) -> bool:
    return {*kept.wholes, *kept.folded} >= set(members)


def _standing(series: dict[int, _Kept], members: tuple[str, ...]) -> list[Standing]:
    return [Standing(step=step, is_whole=_is_whole(kept, members)) for step, kept in series.items()]
