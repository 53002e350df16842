"""Words in memory that processes share: post, wait bounded by peers and a deadline, compare-and-swap.

The exchange, the collectives and the arenas meet here. A word is given by its address in a shared mapping, which the caller keeps
alive; `post` and `wait` take 32-bit words (compared with wrap-around), `load`, `store` and `compare_and_swap` take 64-bit ones.
Native code does the work where there is some, the same futex by ctypes otherwise (futexes.py). All processes that share a word take the
same path: a compare-and-swap by lock and one by instruction do not exclude each other. Nothing here ever waits without an end.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Sequence

from argosy.errors import ConfigError, MismatchError, PeerLost, TimedOut
from argosy.move import counters, futexes
from argosy.native import loader

__all__ = [
    "Peers",
    "break_off",
    "compare_and_swap",
    "fence",
    "load",
    "peek",
    "post",
    "store",
    "wait",
    "wake",
]

SPIN_SECONDS = 30e-6
"""How long a wait spins before it sleeps, where every process can have a core."""

_MASK = 0xFFFF_FFFF
# A call into C handles no signal of Python's: it comes back this often, so that Ctrl-C and handlers work during any wait.
_CALL_SECONDS = 0.2
_FOREVER_NANOSECONDS = 1 << 62
# The broken word: 1 + rank of whom it is about, and above it the status with which the first one gave up.
_REASON_SHIFT = 20
_RANK_MASK = (1 << _REASON_SHIFT) - 1


class Peers:
    """Who must live while somebody waits for them.

    `pidfds` are process descriptors, -1 for this process itself or one that cannot be watched; the owner closes them. `ranks` names
    them in errors (their positions otherwise). `broken` is the address of a shared word that ends every wait when it is not 0.
    """

    def __init__(
        self,
        pidfds: Sequence[int],
        *,
        broken: int | None = None,
        ranks: Sequence[int] | None = None,
        spin_seconds: float | None = None,
    ) -> None:
        if ranks is not None and len(ranks) != len(pidfds):
            raise ConfigError(
                f"{len(pidfds)} process descriptors, but {len(ranks)} ranks",
                fix="give one rank for each descriptor",
            )
        self.pidfds = tuple(pidfds)
        self.ranks = tuple(range(len(pidfds)) if ranks is None else ranks)
        self.broken = None if broken is None else checked(broken, 4)
        self._array = (ctypes.c_int32 * max(1, len(self.pidfds)))(*self.pidfds)
        num_processes = len(self.pidfds) + (-1 not in self.pidfds)
        is_crowded = num_processes > len(os.sched_getaffinity(0))
        default = 0.0 if is_crowded else SPIN_SECONDS
        self.spin_seconds = default if spin_seconds is None else spin_seconds

    def structure(self) -> loader.CPeers:
        """`ag_peers` for one call of native code; lives no longer than this object."""
        return loader.CPeers(len(self.pidfds), -1, ctypes.addressof(self._array), self.broken)


_NOBODY = Peers(())
# Nobody sleeps on it: waking its sleepers is a fence and nothing else.
_unshared = ctypes.c_uint32(0)
_UNSHARED_ADDRESS = ctypes.addressof(_unshared)


def wait(
    word: int, wanted: int, *, deadline: float, peers: Peers | None = None, what: str = ""
) -> None:
    """Return when the word has reached `wanted`; what was written before its `post` is then visible.

    PeerLost when a peer has ended or the broken word is set, TimedOut when `deadline` (of `time.monotonic()`) has passed. `what` says
    in those errors what was waited for.
    """
    checked(word, 4)
    peers = _NOBODY if peers is None else peers
    native = loader.library()
    spin_seconds = peers.spin_seconds
    started = now = time.monotonic()
    while True:
        end = min(deadline, now + _CALL_SECONDS)
        if native is None:
            status, lost = futexes.wait(word, wanted & _MASK, spin_seconds, peers, end)
        else:
            structure = peers.structure()
            status = native.ag_wait(
                word,
                wanted & _MASK,
                int(spin_seconds * 1e9),
                ctypes.addressof(structure),
                _nanoseconds(end),
            )
            lost = structure.lost
        now = time.monotonic()
        if status == loader.OK:
            if now - started > counters.STALL_SECONDS:
                counters.own.stalls += 1
                counters.own.stalled_seconds += now - started
            return
        if status != loader.TIMEOUT or end >= deadline:
            raise _failure(status, lost, peers, what)
        spin_seconds = 0.0


def post(word: int, value: int) -> None:
    """Store `value` after everything that was written before, and wake all who wait for the word."""
    checked(word, 4)
    native = loader.quick()
    if native is None:
        futexes.post(word, value & _MASK)
    else:
        native.ag_post(word, value & _MASK)


def wake(word: int) -> None:
    """Let all who wait for the word look again."""
    checked(word, 4)
    native = loader.quick()
    if native is None:
        futexes.wake(word)
    else:
        native.ag_wake(word)


def fence() -> None:
    """Reads and writes before this are done before those after it, for all processes. Wakes nobody."""
    native = loader.quick()
    if native is None:
        futexes.fence()
    else:
        native.ag_wake(_UNSHARED_ADDRESS)


def peek(word: int) -> int:
    """The 32-bit word as it is now; what was written before its `post` is then visible."""
    checked(word, 4)
    native = loader.quick()
    return futexes.peek(word) if native is None else int(native.ag_peek(word))


def break_off(peers: Peers, rank: int, status: int = loader.PEER_LOST) -> None:
    """End everybody's waits on behalf of `rank`: they raise what this process raises. The first to do so is believed."""
    if peers.broken is None:
        raise ConfigError("these peers have no broken word", fix="give Peers(broken=address)")
    if peek(peers.broken) == 0:
        post(peers.broken, (status << _REASON_SHIFT) | (rank + 1))


def load(word: int) -> int:
    """The 64-bit word; what was written before its `store` is then visible."""
    checked(word, 8)
    native = loader.quick()
    return futexes.load(word) if native is None else int(native.ag_load(word))


def store(word: int, value: int) -> None:
    """Store 64 bits after everything that was written before.

    A word that others compare-and-swap is stored only before they know of it.
    """
    checked(word, 8)
    native = loader.quick()
    if native is None:
        futexes.store(word, value)
    else:
        native.ag_store(word, value)


def compare_and_swap(word: int, expected: int, desired: int, *, descriptor: int = -1) -> bool:
    """Set the 64-bit word to `desired` if it is `expected`, at once for all processes; whether that was done.

    `descriptor` is the memfd that the word lies in: without native code its lock does what an instruction does otherwise.
    """
    checked(word, 8)
    native = loader.quick()
    if native is None:
        return futexes.compare_and_swap(word, expected, desired, descriptor)
    return bool(native.ag_compare_and_swap(word, expected, desired))


def checked(word: int, alignment: int) -> int:
    """The address, if a shared word of so many bytes can have it; ConfigError otherwise."""
    if word <= 0 or word % alignment:
        raise ConfigError(
            f"{word:#x} is no address of a shared word of {alignment} bytes",
            fix="take words from arena.words()",
        )
    return word


def _nanoseconds(deadline: float) -> int:
    if math.isinf(deadline):
        return _FOREVER_NANOSECONDS if deadline > 0 else 0
    return max(0, int(deadline * 1e9))


def _failure(
    status: int, lost: int, peers: Peers, what: str
) -> PeerLost | TimedOut | MismatchError | ConfigError:
    if status == loader.BROKEN and peers.broken is not None:
        told = peek(peers.broken)
        rank, reason = (told & _RANK_MASK) - 1, told >> _REASON_SHIFT
        if reason == loader.MISMATCH:
            return MismatchError(
                f"rank {rank} has called something else than the others",
                fix="its own error names the calls",
            )
        if reason != loader.TIMEOUT:
            return PeerLost(rank, what)
        return _timed_out(peers, what)
    if status == loader.PEER_LOST:
        return PeerLost(peers.ranks[lost], what)
    if status == loader.TIMEOUT:
        return _timed_out(peers, what)
    return ConfigError(
        f"process descriptor {peers.pidfds[lost] if lost >= 0 else '?'} of a peer is not open",
        fix="close the descriptors of peers after the last wait for them",
    )


def _timed_out(peers: Peers, what: str) -> TimedOut:
    ranks = ", ".join(str(rank) for rank in peers.ranks[:16])
    ranks += ", …" if len(peers.ranks) > 16 else ""
    who = f" for ranks {ranks}" if ranks else ""
    return TimedOut(
        f"the deadline has passed while waiting{who}" + (f" during {what}" if what else ""),
        fix="`argosy stacks` shows where they are; raise the timeout if they are only slow",
    )
