"""Reading a few columns of every row: exactly the bands that a box needs, each cell checked.

Chosen by reads.py for boxes of inner dims, where whole chunks would be several times what is wanted. Rows are short, so this goes through the
page cache, which processes of a host that read neighbouring columns share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from argosy.checkpoint import checksums, directio, ranges
from argosy.checkpoint.bands import Grid
from argosy.checkpoint.checksums import Table
from argosy.checkpoint.directio import Buffer, Files
from argosy.checkpoint.gathering import tensor_at
from argosy.errors import CheckpointDamaged
from argosy.move.boxes import Box, Held, row_major

_WORTH = 1.05


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Bands [first_band, last_band) of groups [first, last) of one part of a tensor, and where the wanted box in them goes."""

    tensor: str
    where: str
    """File and checkpoint, for errors."""
    descriptor: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    held: Held
    buffer: torch.Tensor
    grid: Grid
    table: Table
    bands: tuple[int, int]
    groups: tuple[int, int]

    @property
    def run_bytes(self) -> int:
        """Read of each row."""
        return (self.bands[1] - self.bands[0]) * self.grid.band_bytes

    def batches(self, most_bytes: int) -> Iterator[tuple[int, int]]:
        """Groups that fit into a block together."""
        per_group = self.grid.rows * self.run_bytes
        step = max(1, most_bytes // per_group)
        for first in range(*self.groups, step):
            yield first, min(self.groups[1], first + step)

    def read(self, first: int, last: int, block: Buffer, files: Files) -> int:
        """Read, check and scatter groups [first, last); bytes read."""
        grid, run = self.grid, self.run_bytes
        top = first * grid.rows
        num_rows = min(grid.num_rows, last * grid.rows) - top
        start = self.offset + top * grid.row_bytes + self.bands[0] * grid.band_bytes
        for row in range(num_rows):
            _read_run(
                files,
                self.descriptor,
                block.memory[row * run : (row + 1) * run],
                start + row * grid.row_bytes,
                self.where,
            )
        num_bands = self.bands[1] - self.bands[0]
        found = checksums.of_cells(block.address, num_rows, grid.band_bytes, num_bands, grid.rows)
        wanted = self.table.reshape(-1, grid.count)[first:last, slice(*self.bands)].reshape(-1)
        wrong = np.flatnonzero(found != wanted)
        if len(wrong):
            group = first + int(wrong[0]) // num_bands
            raise CheckpointDamaged(
                f"{self.where}: rows {group * grid.rows} to {group * grid.rows + grid.rows_of(group)} of {self.tensor} do not have their checksum",
                fix="use another checkpoint, or a copy of this one",
            )
        self._scatter(top, num_rows, block.address)
        return num_rows * run

    def _scatter(self, top: int, num_rows: int, address: int) -> None:
        rows = Box((top, *self.box.offsets[1:]), (num_rows, *self.box.sizes[1:]))
        cut = rows.intersect(self.box)
        if cut is None:
            return
        size = self.dtype.itemsize
        left = ranges.flat_offset(self.shape[1:], cut.offsets[1:]) * size
        left -= self.bands[0] * self.grid.band_bytes
        at = address + (cut.offsets[0] - top) * self.run_bytes + left
        strides = (self.run_bytes // size, *row_major(self.shape[1:]))
        source = tensor_at(at, cut.sizes, strides, self.dtype)
        place = self.buffer.storage_offset() + self.held.at(cut.offsets)
        with torch.no_grad():
            self.buffer.as_strided(cut.sizes, self.held.strides, place).copy_(source)


def bands_for(
    grid: Grid, shape: tuple[int, ...], box: Box, item_bytes: int, chunked_bytes: int
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(bands, groups) that hold a box, when reading them is less than the chunks would be."""
    inner = shape[1:]
    low = ranges.flat_offset(inner, box.offsets[1:]) * item_bytes
    last = tuple(stop - 1 for stop in box.stops[1:])
    high = (ranges.flat_offset(inner, last) + 1) * item_bytes
    bands = low // grid.band_bytes, -(-high // grid.band_bytes)
    groups = box.offsets[0] // grid.rows, -(-box.stops[0] // grid.rows)
    num_rows = min(grid.num_rows, groups[1] * grid.rows) - groups[0] * grid.rows
    cost = (bands[1] - bands[0]) * grid.band_bytes * num_rows
    fits = (bands[1] - bands[0]) * grid.band_bytes * grid.rows <= directio.BLOCK_BYTES
    return (bands, groups) if fits and cost * _WORTH < chunked_bytes else None


def reopened(descriptor: int) -> int:
    """The same file through the page cache, without reading ahead."""
    found = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(found, 0, 0, os.POSIX_FADV_RANDOM)
    return found


def _read_run(files: Files, descriptor: int, into: memoryview, offset: int, where: str) -> None:
    done = 0
    while done < len(into):
        try:
            count = files.read(descriptor, into[done:], offset + done)
        except OSError as failure:
            raise directio.disk_error(failure, f"{where} cannot be read at {offset + done}")
        if count <= 0:
            raise CheckpointDamaged(
                f"{where} ends at {offset + done}", fix="use another checkpoint"
            )
        done += count
