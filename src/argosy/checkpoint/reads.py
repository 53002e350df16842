"""Verified reading of tensors: chunks or columns that boxes need, checked, then scattered to where they are wanted.

A chunk is read once per call however many requests want parts of it; fetches.py reads and checks, so nothing is handed out before its checksum is
right. Callers: the loader and the lazy open.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from argosy.checkpoint import columns, ranges, sharing
from argosy.checkpoint.bands import Grid
from argosy.checkpoint.checksums import Table
from argosy.checkpoint.columns import Columns
from argosy.checkpoint.directio import FILES, Buffer, Files
from argosy.checkpoint.fetches import (
    STRETCH_BYTES,
    THREADS,
    Block,
    Job,
    Statistics,
    Stored,
    fetch,
    run,
)
from argosy.checkpoint.gathering import tensor_at
from argosy.checkpoint.neighbours import Piece, Visit
from argosy.checkpoint.sharing import Need
from argosy.move.boxes import Box, Held, row_major
from argosy.move.rows import copy_bytes


@dataclass(frozen=True, kw_only=True)
class Request:
    """A box of one part of a tensor, and where it goes: element `held.at(…)` of `buffer`, both in the part's coordinates."""

    tensor: str
    offset: int
    """First byte of the part in the file."""
    shape: tuple[int, ...]
    """Of the part."""
    dtype: torch.dtype
    box: Box
    held: Held
    """Its box is `box`, its place that in `buffer`."""
    buffer: torch.Tensor
    cells: tuple[Grid, Table] | None = None
    """Checksums of its columns, where the checkpoint has them."""

    @property
    def stop(self) -> int:
        """First byte behind the part."""
        volume = 1
        for size in self.shape:
            volume *= size
        return self.offset + volume * self.dtype.itemsize


def read(
    work: Sequence[tuple[Stored, Sequence[Request]]],
    *,
    threads: int = THREADS,
    files: Files = FILES,
    visit: Visit | None = None,
) -> Statistics:
    """Fill every request; CheckpointDamaged names the file, the chunk and the tensors in it.

    With a visit, processes of this host that read the same now read it for each other.
    """
    statistics = Statistics(files=len(work))
    plans: dict[str, _Plan] = {}
    jobs: list[Job] = []
    with ExitStack() as stack:
        for stored, requests in work:
            statistics.bytes_wanted += sum(one.box.volume * one.dtype.itemsize for one in requests)
            plain: list[Request] = []
            narrow: list[tuple[Request, Span]] = []
            for one in requests:
                span = _columns_of(one, stored) if files.is_disk else None
                if span is None:
                    plain.append(one)
                else:
                    narrow.append((one, span))
            if narrow:
                descriptor = columns.reopened(stored.descriptor)
                stack.callback(os.close, descriptor)
                for one, span in narrow:
                    jobs += _column_jobs(stored, one, span, descriptor, files)
            plans[stored.name] = _Plan(stored, plain, files, statistics)
        pieces: list[Piece] = []
        if visit is not None:
            pieces = stack.enter_context(visit).meet(
                {name: plan.need for name, plan in plans.items()}
            )
        # Shared ones first: everybody deals with them in the same order, and nobody waits for what only one wants.
        shared = [plans[one.stretch.file].shared_job(one) for one in pieces]
        for plan in plans.values():
            jobs += plan.jobs_beside(pieces)
        run([*shared, *jobs], statistics, threads)
    return statistics


Span = tuple[tuple[int, int], tuple[int, int]]
"""Bands and groups."""


def _columns_of(one: Request, stored: Stored) -> Span | None:
    """The cells to read for a box of inner dims, if that is less than whole chunks."""
    if one.cells is None or one.box.sizes[1:] == one.shape[1:]:
        return None
    starts, length = ranges.runs_of_box(one.shape, one.box)
    size = one.dtype.itemsize
    found = ranges.chunks_of_runs(one.offset + starts * size, length * size, stored.chunk_bytes)
    chunked = len(found) * stored.chunk_bytes
    return columns.bands_for(one.cells[0], one.shape, one.box, size, chunked)


def _column_jobs(
    stored: Stored, one: Request, span: Span, descriptor: int, files: Files
) -> list[Job]:
    assert one.cells is not None
    wanted = Columns(
        tensor=one.tensor,
        where=f"{stored.name} of {stored.checkpoint}",
        descriptor=descriptor,
        offset=one.offset,
        shape=one.shape,
        dtype=one.dtype,
        box=one.box,
        held=one.held,
        buffer=one.buffer,
        grid=one.cells[0],
        table=one.cells[1],
        bands=span[0],
        groups=span[1],
    )

    def job(first: int, last: int) -> Job:
        return lambda block: wanted.read(first, last, block, files)

    return [job(first, last) for first, last in wanted.batches(STRETCH_BYTES)]


class _Plan:
    """Whole chunks of one file, and the requests that want parts of them."""

    def __init__(
        self, stored: Stored, requests: Sequence[Request], files: Files, statistics: Statistics
    ) -> None:
        self._stored = stored
        self._files = files
        self._statistics = statistics
        self._scatter = _Scatter(requests)
        chunks = self._scatter.chunks(stored.chunk_bytes)
        self.need = Need(chunks, stored.chunk_bytes, stored.size)

    def jobs_beside(self, pieces: Sequence[Piece]) -> list[Job]:
        """What is in none of the pieces."""
        shared = [
            (one.stretch.start, one.stretch.stop)
            for one in pieces
            if one.stretch.file == self._stored.name
        ]
        chunks = sharing.rest(self.need, shared)
        stored = self._stored
        found = ranges.stretches(chunks, stored.chunk_bytes, stored.size, STRETCH_BYTES)
        return [self._job(start, stop) for start, stop in found]

    def shared_job(self, piece: Piece) -> Job:
        """A piece: read for all, or taken from the one that reads it."""
        start, stop = piece.stretch.start, piece.stretch.stop
        alone = self._job(start, stop)

        def give(_: Buffer) -> int:
            piece.give(lambda block: self._fetch(start, stop, block), use)
            self._statistics.share(given=stop - start)
            return stop - start

        def take(block: Buffer) -> int:
            if not piece.take(use):
                return alone(block)
            self._statistics.share(taken=stop - start)
            return 0

        def use(address: int) -> None:
            self._scatter(start, stop, address)

        return give if piece.is_own else take

    def _job(self, start: int, stop: int) -> Job:
        def read_one(block: Buffer) -> int:
            self._fetch(start, stop, block)
            self._scatter(start, stop, block.address)
            return stop - start

        return read_one

    def _fetch(self, start: int, stop: int, block: Block) -> None:
        fetch(self._stored, start, stop, block, self._files)


class _Scatter:
    """All requests of one file, found by offset."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = sorted(requests, key=lambda one: (one.offset, one.stop))
        self._starts = [one.offset for one in self._requests]
        # Parts never overlap, but several requests may want one part: remember where its first one stands.
        self._furthest: list[int] = []
        for one in self._requests:
            before = self._furthest[-1] if self._furthest else 0
            self._furthest.append(max(before, one.stop))

    def chunks(self, chunk_bytes: int) -> ranges.Starts:
        """Chunks that any request touches."""
        found = []
        for one in self._requests:
            starts, length = ranges.runs_of_box(one.shape, one.box)
            size = one.dtype.itemsize
            found.append(
                ranges.chunks_of_runs(one.offset + starts * size, length * size, chunk_bytes)
            )
        return ranges.union(found)

    def __call__(self, start: int, stop: int, address: int) -> None:
        first = bisect_right(self._furthest, start)
        for one in self._requests[first:]:
            if one.offset >= stop:
                break
            if one.stop > start:
                _copy_out(one, start, stop, address)


def _copy_out(one: Request, start: int, stop: int, address: int) -> None:
    """What a stretch has of a request, to its destination."""
    size = one.dtype.itemsize
    low, high = max(start, one.offset), min(stop, one.stop)
    first, last = (low - one.offset) // size, (high - one.offset) // size
    is_whole = one.box.sizes == one.shape and one.buffer.dtype == one.dtype
    if is_whole and one.held.strides == row_major(one.shape):
        target = one.buffer.data_ptr() + (one.held.start + first) * size
        copy_bytes(target, address + low - start, high - low)
        return
    for piece in ranges.boxes_of_range(one.shape, first, last):
        cut = piece.intersect(one.box)
        if cut is None:
            continue
        at = address + one.offset - start + ranges.flat_offset(one.shape, cut.offsets) * size
        source = tensor_at(at, cut.sizes, row_major(one.shape), one.dtype)
        place = one.buffer.storage_offset() + one.held.at(cut.offsets)
        with torch.no_grad():
            one.buffer.as_strided(cut.sizes, one.held.strides, place).copy_(source)
