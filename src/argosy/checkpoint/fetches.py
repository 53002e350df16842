"""Verified stretches of stored files: read into blocks, every chunk checked before anybody sees its bytes.

Several threads, each with one block: memory stays bounded whatever is read. Used by the reader of tensors, by the verification and by whoever needs a
header or the values. No torch; decides nothing about what is wanted.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from argosy.checkpoint import checksums, directio, ranges
from argosy.checkpoint.checksums import Table
from argosy.checkpoint.directio import ALIGNMENT, BLOCKS, FILES, Buffer, Files
from argosy.errors import CheckpointDamaged

THREADS = 4
STRETCH_BYTES = directio.BLOCK_BYTES
Progress = Callable[[int], None]
"""Told how many bytes more have been read; called in the reading threads."""


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


@dataclass
class Statistics:
    """What a read took."""

    bytes_read: int = 0
    """Read from the files by this process, for itself and for others."""
    bytes_wanted: int = 0
    bytes_given: int = 0
    """Of those that were read, what other processes of the host could take."""
    bytes_taken: int = 0
    """Not read, but taken from another process of the host that has read and checked them."""
    stretches: int = 0
    files: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, num_bytes: int) -> None:
        """One stretch more."""
        with self.lock:
            self.bytes_read += num_bytes
            self.stretches += 1

    def share(self, *, given: int = 0, taken: int = 0) -> None:
        """Bytes that several processes use, and one has read."""
        with self.lock:
            self.bytes_given += given
            self.bytes_taken += taken


class Block(Protocol):
    """Memory that a stretch is read into; its beginning is aligned."""

    @property
    def memory(self) -> memoryview:
        """All of it."""

    @property
    def address(self) -> int:
        """Of its first byte."""


Job = Callable[[Buffer], int]
"""Reads something into a block, checks it and hands it out; how many bytes it read."""


def verify(
    stored: Sequence[Stored],
    *,
    threads: int = THREADS,
    files: Files = FILES,
    progress: Progress | None = None,
) -> Statistics:
    """Read all chunks of files and check them."""
    statistics = Statistics(files=len(stored))

    def job(one: Stored, start: int, stop: int) -> Job:
        def check(block: Buffer) -> int:
            fetch(one, start, stop, block, files)
            if progress is not None:
                progress(stop - start)
            return stop - start

        return check

    jobs = []
    for one in stored:
        chunks = np.arange(len(one.table), dtype=np.int64)
        found = ranges.stretches(chunks, one.chunk_bytes, one.size, STRETCH_BYTES)
        jobs += [job(one, start, stop) for start, stop in found]
    run(jobs, statistics, threads)
    return statistics


def read_bytes(stored: Stored, start: int, stop: int, *, files: Files = FILES) -> bytes:
    """A verified stretch of a file as bytes: headers and values."""
    chunk = stored.chunk_bytes
    low, high = start // chunk * chunk, min(stored.size, -(-stop // chunk) * chunk)
    found = bytearray()
    with BLOCKS.lent() as block:
        for at in range(low, high, STRETCH_BYTES):
            end = min(high, at + STRETCH_BYTES)
            fetch(stored, at, end, block, files)
            found += block.memory[: end - at]
    return bytes(found[start - low : stop - low])


def run(jobs: Sequence[Job], statistics: Statistics, threads: int) -> None:
    """Carry jobs out, several at once; the first failure ends the rest."""
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


def fetch(stored: Stored, start: int, stop: int, block: Block, files: Files) -> None:
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
