"""The block writer: duties become bytes on disk and checksums, in blocks of 8 MiB, several at once, past the page cache.

Whole blocks go by O_DIRECT; what shares a page with another process, and a file's last bytes, go through the page cache. Runs in the process that saves
or in the writer process: a `Source` gives the bytes, `pace` is asked before each block (rates, progress, cancellation). Leaves no half-open file.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from argosy.checkpoint import bands, checksums, directio, tables
from argosy.checkpoint.checksums import Piece, Stretch
from argosy.checkpoint.directio import ALIGNMENT, BLOCKS, FILES, Files
from argosy.checkpoint.layouts import Image
from argosy.checkpoint.shares import Duty
from argosy.checkpoint.sources import Run, Source
from argosy.checkpoint.tables import CellsWritten, Written

Pace = Callable[[int], None]
THREADS = 4


class BlockWriter:
    """Writes an image's files into one directory; `write` once, or several times with other duties."""

    def __init__(
        self,
        directory: int,
        image: Image,
        source: Source,
        *,
        threads: int = THREADS,
        pace: Pace | None = None,
        files: Files = FILES,
    ) -> None:
        self._directory = directory
        self._image = image
        self._source = source
        self._starts = [[slot.offset for slot in file.slots] for file in image.files]
        self._threads = threads
        self._pace = pace
        self._files = files
        self._is_direct = directio.can_write_direct(files, directory)

    def write(self, duties: Sequence[Duty]) -> list[Written]:
        """Reserve, write and flush every file that a duty touches; HomeError names file and tensors of what failed."""
        touched = sorted({duty.file for duty in duties})
        opened: dict[int, tuple[int, int]] = {}
        try:
            for number in touched:
                opened[number] = self._open(number)
            with ThreadPoolExecutor(self._threads, thread_name_prefix="argosy-blocks") as pool:
                running = [pool.submit(self._write_one, duty, opened[duty.file]) for duty in duties]
                try:
                    written = [one.result() for one in as_completed(running)]
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
                for _ in pool.map(self._flush, [(number, opened[number]) for number in touched]):
                    pass
        finally:
            for direct, plain in opened.values():
                os.close(plain)
                if direct != plain:
                    os.close(direct)
        return written

    @property
    def is_direct(self) -> bool:
        """Whether blocks go past the page cache here."""
        return self._is_direct

    def _open(self, number: int) -> tuple[int, int]:
        """(for whole blocks, for the rest)"""
        file = self._image.files[number]
        flags = os.O_WRONLY | os.O_CREAT
        try:
            plain = self._files.open(file.name, flags, self._directory)
            try:
                self._files.reserve(plain, file.size)
                if not self._is_direct:
                    return plain, plain
                return self._files.open(file.name, flags | os.O_DIRECT, self._directory), plain
            except OSError:
                os.close(plain)
                raise
        except OSError as failure:
            raise directio.disk_error(failure, f"{file.name} ({file.size} bytes) cannot be made")

    def _write_one(self, duty: Duty, descriptors: tuple[int, int]) -> Written:
        file = self._image.files[duty.file]
        try:
            if self._pace is not None:
                self._pace(duty.stop - duty.start)
            runs = [(duty.start, duty.stop)]
            address = self._source.view(duty)
            if address is not None:
                return self._send(duty, descriptors, address, runs)
            pieces = self._source.pieces(duty)
            with BLOCKS.lent() as block:
                if pieces is None:
                    if duty.fragments is not None:
                        ctypes.memset(block.address, 0, duty.stop - duty.start)
                    runs = self._source.fill(duty, block.address)
                return self._send(duty, descriptors, block.address, runs, pieces)
        except OSError as failure:
            inside = self._source.tensors_in(duty)
            whose = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if inside[3:] else "")
            raise directio.disk_error(
                failure, f"{file.name}, bytes {duty.start} to {duty.stop} ({whose or 'its header'})"
            )

    def _send(
        self,
        duty: Duty,
        descriptors: tuple[int, int],
        address: int,
        runs: list[Run],
        pieces: Sequence[Piece] | None = None,
    ) -> Written:
        """What lies at an address, or is brought there from its pieces by the same look that its checksums take."""
        length = duty.stop - duty.start
        chunk_bytes = tables.chunk_bytes_for(self._image.files[duty.file].size)
        names, stretches = self._stretches(duty)
        if pieces is None:
            crcs, cells = checksums.of_block(address, length, chunk_bytes, stretches)
        else:
            crcs, cells = checksums.of_gathered(address, pieces, chunk_bytes, stretches)
        memory = memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
        for start, stop in runs:
            low, high = start - duty.start, stop - duty.start
            self._send_run(descriptors, memory[low:high], start)
        return Written(
            file=self._image.files[duty.file].name,
            start=duty.start,
            num_bytes=sum(stop - start for start, stop in runs),
            crcs=tables.pack(crcs),
            # A checksum of columns costs a pass without native code: there are none then.
            cells=tuple(
                CellsWritten(name, stretch.first_group, tables.pack(crcs))
                for name, stretch, crcs in zip(names, stretches, cells, strict=False)
            ),
        )

    def _stretches(self, duty: Duty) -> tuple[list[str], list[Stretch]]:
        """What the block has of tensors with checksums of columns, and their names."""
        slots = self._image.files[duty.file].slots
        first = max(0, bisect_right(self._starts[duty.file], duty.start) - 1)
        names, found = [], []
        for slot in itertools.islice(slots, first, None):
            if slot.offset >= duty.stop:
                break
            low, high = max(duty.start, slot.offset), min(duty.stop, slot.stop)
            grid = bands.grid_of(slot.shape, slot.item_bytes) if low < high else None
            if grid is not None:
                start, stop = low - slot.offset, high - slot.offset
                names.append(slot.name)
                found.append(bands.stretch_of(grid, start, stop, low - duty.start))
        return names, found

    def _send_run(self, descriptors: tuple[int, int], data: memoryview, offset: int) -> None:
        """The aligned middle directly, the edges through the page cache."""
        direct, plain = descriptors
        first = -offset % ALIGNMENT
        middle = (len(data) - first) // ALIGNMENT * ALIGNMENT
        if direct == plain or middle < ALIGNMENT:
            directio.write_all(self._files, plain, data, offset)
            return
        directio.write_all(self._files, plain, data[:first], offset)
        directio.write_all(self._files, direct, data[first : first + middle], offset + first)
        last = first + middle
        directio.write_all(self._files, plain, data[last:], offset + last)

    def _flush(self, one: tuple[int, tuple[int, int]]) -> None:
        number, (_, plain) = one
        try:
            self._files.flush(plain)
            if not self._is_direct:
                os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as failure:
            name = self._image.files[number].name
            raise directio.disk_error(failure, f"{name} cannot be flushed to the disk")
