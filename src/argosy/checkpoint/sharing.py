"""Who of a host's processes reads what for whom: decided from what each says that it wants of a checkpoint's files.

Those that want the same stretches read them in turn, and what each offers holds: whoever is not in an offer reads for itself. neighbours.py carries
the words, windows.py the bytes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from argosy.checkpoint import ranges
from argosy.checkpoint.ranges import Starts

MOST_PLACES = 62
"""Of a host that share: a bit each. Those behind read for themselves."""
MOST_BYTES = 4 << 20
"""Of what one process says: stores of torch.distributed take 8 MiB at a time."""
LEAST_BYTES = 1 << 20
"""Shorter runs are not worth a read of their own: mostly the chunk in which two processes' rows meet."""


@dataclass(frozen=True)
class Need:
    """What a process wants of one file: numbers of chunks, rising."""

    chunks: Starts
    chunk_bytes: int
    size: int
    """Of the file."""


class Wanted(msgspec.Struct, frozen=True):
    """What a process says that it wants."""

    pid: int
    files: dict[str, bytes]
    """Runs of chunks, each as two numbers of 8 bytes: the first chunk, and the one behind the last."""


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that one process reads for all that want them, itself among these."""

    file: str
    start: int
    stop: int
    places: tuple[int, ...]


class Measure(msgspec.Struct, frozen=True, array_like=True):
    """How large a window is: blocks that are used in turn, and all that take from it, the one that reads among them."""

    num_blocks: int
    block_bytes: int
    places: tuple[int, ...]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a process reads for others, in order, and where they find it; nothing when there are no stretches."""

    pid: int = 0
    descriptor: int = -1
    nonce: int = 0
    measure: Measure | None = None
    stretches: tuple[Stretch, ...] = ()


def wanted_of(pid: int, needs: Mapping[str, Need]) -> Wanted:
    """What to say; what would be too long is left unsaid, and read alone."""
    files = {name: _runs_of(need.chunks).tobytes() for name, need in needs.items()}
    is_short = sum(map(len, files.values())) <= MOST_BYTES
    return Wanted(pid, files if is_short else {})


def is_common(needs: Mapping[str, Need], other: Wanted) -> bool:
    """Whether another process wants some of the same."""
    return any(
        name in needs and bool(_is_in(needs[name].chunks, runs).any())
        for name, runs in other.files.items()
    )


def plan_stretches(
    needs: Mapping[str, Need], place: int, others: Mapping[int, Wanted], most_bytes: int
) -> tuple[Stretch, ...]:
    """What the process at a place reads for others, by file and offset."""
    if place >= MOST_PLACES:
        return ()
    found: list[Stretch] = []
    for name, need in sorted(needs.items()):
        masks = np.full(len(need.chunks), 1 << place, np.int64)
        for other, wanted in others.items():
            if other < MOST_PLACES and name in wanted.files:
                masks |= _is_in(need.chunks, wanted.files[name]).astype(np.int64) << other
        for run in _split(need.chunks, masks):
            chunks, mask = need.chunks[run], int(masks[run.start])
            places = tuple(one for one in range(MOST_PLACES) if mask >> one & 1)
            if len(places) == 1 or len(chunks) * need.chunk_bytes < LEAST_BYTES:
                continue
            for start, stop in ranges.stretches(chunks, need.chunk_bytes, need.size, most_bytes):
                # By where it lies, and not by counting: that is the same for all.
                if places[start // most_bytes % len(places)] == place:
                    found.append(Stretch(name, start, stop, places))
    return tuple(found)


def measure_of(stretches: Sequence[Stretch], num_blocks: int, alignment: int) -> Measure:
    """A window for these stretches; `num_blocks` are those of all that take turns."""
    longest = max(one.stop - one.start for one in stretches)
    places = sorted({place for one in stretches for place in one.places})
    block_bytes = -(-longest // alignment) * alignment
    own_blocks = min(-(-num_blocks // len(places)), len(stretches))
    return Measure(own_blocks, block_bytes, tuple(places))


def rest(need: Need, stretches: Iterable[tuple[int, int]]) -> Starts:
    """The chunks that no stretch [start, stop) of the file has."""
    is_left = np.ones(len(need.chunks), np.bool_)
    for start, stop in stretches:
        edges = [start // need.chunk_bytes, -(-stop // need.chunk_bytes)]
        low, high = np.searchsorted(need.chunks, edges)
        is_left[low:high] = False
    return need.chunks[is_left]


def _runs_of(chunks: Starts) -> Starts:
    breaks = np.flatnonzero(np.diff(chunks) != 1) + 1
    starts = np.concatenate([chunks[:1], chunks[breaks]])
    stops = np.concatenate([chunks[breaks - 1], chunks[-1:]]) + 1
    return np.stack([starts, stops], axis=1)


def _is_in(chunks: Starts, runs: bytes) -> npt.NDArray[np.bool_]:
    """Which chunks lie in runs as `Wanted` has them."""
    edges = np.frombuffer(runs, np.int64)
    # An odd number of edges at or before a chunk: a run has begun and not ended.
    found: npt.NDArray[np.bool_] = np.searchsorted(edges, chunks, side="right") % 2 == 1
    return found


def _split(chunks: Starts, masks: Starts) -> Sequence[slice]:
    """Where neighbours that are wanted by the same begin and end."""
    breaks = np.flatnonzero((np.diff(chunks) != 1) | (np.diff(masks) != 0)) + 1
    edges = [0, *breaks.tolist(), len(chunks)]
    return [slice(low, high) for low, high in pairwise(edges) if low < high]
