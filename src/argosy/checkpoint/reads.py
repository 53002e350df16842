"""Verified reading: stretches of files into blocks, every chunk checked, then scattered to where it is wanted.

Several threads, each with one block: memory stays bounded whatever is read. A chunk is read once per call however many requests want parts of it.
Nothing is handed out before its checksum is right. Callers: the loader, the lazy open and the verification.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from argosy.checkpoint import checksums, columns, directio, ranges
from argosy.checkpoint.bands import Grid
from argosy.checkpoint.checksums import Table
from argosy.checkpoint.columns import Columns
from argosy.checkpoint.directio import ALIGNMENT, BLOCKS, FILES, Buffer, Files
from argosy.checkpoint.gathering import tensor_at
from argosy.errors import CheckpointDamaged
from argosy.move.boxes import Box, Held, row_major

THREADS = 4
STRETCH_BYTES = directio.BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A file that is open for reading, with its chunks' checksums."""

    name: str
    descriptor: int
    size: int
    chunk_bytes: int
    table: Table
    is_direct: bool
    checkpoint: str


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


@dataclass
class Statistics:
    """What a read took."""

    bytes_read: int = 0
    bytes_wanted: int = 0
    stretches: int = 0
    files: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, num_bytes: int) -> None:
        """One stretch more."""
        with self.lock:
            self.bytes_read += num_bytes
            self.stretches += 1


Job = Callable[[Buffer], int]
"""Reads something into a block, checks it and hands it out; how many bytes it read."""


def read(
    work: Sequence[tuple[Stored, Sequence[Request]]],
    *,
    threads: int = THREADS,
    files: Files = FILES,
) -> Statistics:
    """Fill every request; CheckpointDamaged names the file, the chunk and the tensors in it."""
    statistics = Statistics(files=len(work))
    jobs: list[Job] = []
    with ExitStack() as stack:
        for stored, requests in work:
            statistics.bytes_wanted += sum(one.box.volume * one.dtype.itemsize for one in requests)
            plain: list[Request] = []
            narrow: list[tuple[Request, Span]] = []
            for one in requests:
                span = _columns_of(one, stored)
                if span is None:
                    plain.append(one)
                else:
                    narrow.append((one, span))
            if narrow:
                descriptor = columns.reopened(stored.descriptor)
                stack.callback(os.close, descriptor)
                for one, span in narrow:
                    jobs += _column_jobs(stored, one, span, descriptor, files)
            jobs += _stretch_jobs(stored, plain, files)
        _run(jobs, statistics, threads)
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


def _stretch_jobs(stored: Stored, requests: Sequence[Request], files: Files) -> list[Job]:
    if not requests:
        return []
    scatter = _Scatter(requests)
    chunks = scatter.chunks(stored.chunk_bytes)

    def job(start: int, stop: int) -> Job:
        def read_one(block: Buffer) -> int:
            _fetch(stored, start, stop, block, files)
            scatter(start, stop, block.address)
            return stop - start

        return read_one

    found = ranges.stretches(chunks, stored.chunk_bytes, stored.size, STRETCH_BYTES)
    return [job(start, stop) for start, stop in found]


def verify(stored: Sequence[Stored], *, threads: int = THREADS, files: Files = FILES) -> Statistics:
    """Read all chunks of files and check them."""
    statistics = Statistics(files=len(stored))

    def job(one: Stored, start: int, stop: int) -> Job:
        def check(block: Buffer) -> int:
            _fetch(one, start, stop, block, files)
            return stop - start

        return check

    jobs = []
    for one in stored:
        chunks = np.arange(len(one.table), dtype=np.int64)
        found = ranges.stretches(chunks, one.chunk_bytes, one.size, STRETCH_BYTES)
        jobs += [job(one, start, stop) for start, stop in found]
    _run(jobs, statistics, threads)
    return statistics


def read_bytes(stored: Stored, start: int, stop: int, *, files: Files = FILES) -> bytes:
    """A verified stretch of a file as bytes: headers and values."""
    chunk = stored.chunk_bytes
    low, high = start // chunk * chunk, min(stored.size, -(-stop // chunk) * chunk)
    found = bytearray()
    with BLOCKS.lent() as block:
        for at in range(low, high, STRETCH_BYTES):
            end = min(high, at + STRETCH_BYTES)
            _fetch(stored, at, end, block, files)
            found += block.memory[: end - at]
    return bytes(found[start - low : stop - low])


def _run(jobs: Sequence[Job], statistics: Statistics, threads: int) -> None:
    has_failed = threading.Event()

    def one(job: Job) -> None:
        if has_failed.is_set():
            return
        try:
            with BLOCKS.lent() as block:
                statistics.add(job(block))
        except BaseException:
            has_failed.set()
            raise

    if len(jobs) <= 1:
        for job in jobs:
            one(job)
        return
    with ThreadPoolExecutor(min(threads, len(jobs)), thread_name_prefix="argosy-reads") as pool:
        for _ in pool.map(one, jobs):
            pass


def _fetch(stored: Stored, start: int, stop: int, block: Buffer, files: Files) -> None:
    """Read a stretch that begins with a chunk, and check every chunk of it."""
    length, done = stop - start, 0
    room = -(-length // ALIGNMENT) * ALIGNMENT if stored.is_direct else length
    where = f"{stored.name} of {stored.checkpoint}"
    while done < length:
        try:
            count = files.read(stored.descriptor, block.memory[done:room], start + done)
        except OSError as failure:
            if failure.errno == errno.EINVAL and directio.stop_direct(stored.descriptor):
                continue
            raise directio.disk_error(failure, f"{where} cannot be read at {start + done}")
        if count <= 0 or (count % ALIGNMENT and done + count < length):
            raise CheckpointDamaged(
                f"{where} ends at {start + done + max(0, count)}, not at {stored.size}",
                fix="use another checkpoint",
            )
        done += count
    found = checksums.of_chunks(block.address, length, stored.chunk_bytes)
    first = start // stored.chunk_bytes
    wrong = np.flatnonzero(found != stored.table[first : first + len(found)])
    if len(wrong):
        chunk = first + int(wrong[0])
        raise DamagedChunk(stored, chunk)


class DamagedChunk(CheckpointDamaged):
    """Bytes of a file are not those that were saved; whoever knows the manifest adds the tensors' names."""

    def __init__(self, stored: Stored, chunk: int) -> None:
        self.file = stored.name
        self.start = chunk * stored.chunk_bytes
        self.stop = min(stored.size, self.start + stored.chunk_bytes)
        super().__init__(
            f"{stored.name} of {stored.checkpoint}: bytes {self.start} to {self.stop} do not have their checksum",
            fix="use another checkpoint, or a copy of this one",
        )


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
        ctypes.memmove(target, address + low - start, high - low)
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
