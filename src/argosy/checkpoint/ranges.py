"""Boxes and byte runs: which bytes of a row-major tensor a box takes, which boxes a stretch of bytes is, what to read for it.

Used by the writer (a block is stretches of tensors), by shares.py and by the reader (a box is runs, runs are chunks, chunks are stretches). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from argosy.move.boxes import Box, row_major

Starts = npt.NDArray[np.int64]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a row-major tensor as boxes, in order: at most one per dim going up, and one coming down."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in _cut(tuple(shape), start, stop)]


def _cut(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[list[int], list[int]]]:
    if len(shape) == 1:
        return [([start], [stop - start])]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _under(first, _cut(shape[1:], head, tail))
    found: list[tuple[list[int], list[int]]] = []
    if head:
        found += _under(first, _cut(shape[1:], head, inner))
        first += 1
    if first < last:
        zeros = [0] * (len(shape) - 1)
        found.append(([first, *zeros], [last - first, *shape[1:]]))
    if tail:
        found += _under(last, _cut(shape[1:], 0, tail))
    return found


def _under(
    index: int, boxes: list[tuple[list[int], list[int]]]
) -> list[tuple[list[int], list[int]]]:
    return [([index, *offsets], [1, *sizes]) for offsets, sizes in boxes]


def flat_offset(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where in a row-major tensor an element lies."""
    return sum(map(int.__mul__, offsets, row_major(shape)))


def runs_of_box(shape: Sequence[int], box: Box) -> tuple[Starts, int]:
    """Where each unbroken run of a box begins in the row-major tensor, in order, and the length of all of them; in elements."""
    if not box.volume:
        return np.empty(0, np.int64), 0
    strides = row_major(shape)
    dim = len(shape)
    while dim > 0 and box.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    # dims from `dim` on are whole; the one before is cut but still unbroken
    outer = max(0, dim - 1)
    length = math.prod(box.sizes[outer:])
    starts = np.array([flat_offset(shape, box.offsets)], dtype=np.int64)
    for size, stride in zip(box.sizes[:outer], strides[:outer], strict=True):
        steps = np.arange(size, dtype=np.int64) * stride
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return starts, length


def chunks_of_runs(starts: Starts, length: int, chunk_bytes: int) -> Starts:
    """Numbers of the chunks that runs touch, rising, each once; starts and length in bytes of the file."""
    if not len(starts) or not length:
        return np.empty(0, np.int64)
    first, last = starts // chunk_bytes, (starts + length - 1) // chunk_bytes
    widest = int((last - first).max()) + 1
    if widest == 1:
        return np.unique(first)
    spread = first[:, None] + np.arange(widest, dtype=np.int64)[None, :]
    return np.unique(np.minimum(spread, last[:, None]).reshape(-1))


def stretches(
    chunks: Starts, chunk_bytes: int, size: int, most_bytes: int
) -> list[tuple[int, int]]:
    """Chunks as stretches [start, stop) of a file, neighbours joined, none longer than `most_bytes`."""
    if not len(chunks):
        return []
    breaks = np.flatnonzero(np.diff(chunks) != 1) + 1
    edges = [0, *breaks.tolist(), len(chunks)]
    found = []
    for low, high in pairwise(edges):
        start = int(chunks[low]) * chunk_bytes
        stop = min(size, (int(chunks[high - 1]) + 1) * chunk_bytes)
        # Pieces begin at multiples of the longest stretch: neighbours in other requests then share them.
        while start < stop:
            end = min(stop, (start // most_bytes + 1) * most_bytes)
            found.append((start, end))
            start = end
    return found


def union(chunk_sets: Iterable[Starts]) -> Starts:
    """All chunks of several requests, each once."""
    sets = [one for one in chunk_sets if len(one)]
    return np.unique(np.concatenate(sets)) if sets else np.empty(0, np.int64)
