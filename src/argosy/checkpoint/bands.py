"""Checksums of columns: a tensor seen as rows, cut into bands of columns and groups of rows, with a CRC32C per cell.

A reader that wants a few columns of every row (a shard of an inner dim) checks exactly what it reads; chunks would make it read whole rows.
Pure but for checksums of memory at hand; the block writer adds cells, the manifest carries them, the reader uses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from argosy.checkpoint import checksums, tables
from argosy.checkpoint.checksums import Stretch, Table
from argosy.checkpoint.tables import CellsWritten
from argosy.errors import CheckpointDamaged

NUM_BANDS = 8
_CELL_BYTES = 1 << 16
_SMALLEST_TENSOR = 1 << 20
_NARROWEST_BAND = 256
_WIDEST_ROW = 4 << 20


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """How a tensor is cut: cell (g, b) is band b of rows [g · rows, (g + 1) · rows)."""

    num_rows: int
    count: int
    band_bytes: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.count * self.band_bytes

    @property
    def group_bytes(self) -> int:
        """Of one group of rows; they lie together in the file."""
        return self.rows * self.row_bytes

    @property
    def num_groups(self) -> int:
        """Groups of rows; the last may have fewer."""
        return -(-self.num_rows // self.rows)

    def rows_of(self, group: int) -> int:
        """Rows of a group."""
        return min(self.rows, self.num_rows - group * self.rows)

    def zeros(self, first: int, last: int) -> Table:
        """What cells of groups [first, last) have when all their bytes are zero."""
        sizes = [self.rows_of(group) * self.band_bytes for group in range(first, last)]
        found = np.array([checksums.of_zeros(size) for size in sizes], dtype=np.uint32)
        return np.repeat(found, self.count)


class Bands(msgspec.Struct, frozen=True, kw_only=True):
    """In the manifest: bands to a row, rows to a cell, the table group by group."""

    count: int
    rows: int
    crc32c: str


def grid_of(shape: Sequence[int], item_bytes: int) -> Grid | None:
    """The grid of a tensor that is worth one: large, with rows that eight bands divide."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    width = math.prod(shape[1:])
    row_bytes = width * item_bytes
    band_bytes = row_bytes // NUM_BANDS
    if shape[0] * row_bytes < _SMALLEST_TENSOR or width % NUM_BANDS:
        return None
    if band_bytes < _NARROWEST_BAND or row_bytes > _WIDEST_ROW:
        return None
    rows = max(1, _CELL_BYTES // band_bytes)
    return Grid(num_rows=shape[0], count=NUM_BANDS, band_bytes=band_bytes, rows=rows)


def stored_grid(shape: Sequence[int], item_bytes: int, bands: Bands, what: str) -> Grid:
    """The grid that a manifest tells of; CheckpointDamaged when it cannot be."""
    width = math.prod(shape[1:]) if len(shape) >= 2 else 0
    if not width or not shape[0] or not 0 < bands.count <= width or width % bands.count:
        raise CheckpointDamaged(f"{what} has bands that do not divide its rows")
    grid = Grid(
        num_rows=shape[0],
        count=bands.count,
        band_bytes=width // bands.count * item_bytes,
        rows=bands.rows,
    )
    if bands.rows < 1 or len(tables.unpack(bands.crc32c, what)) != grid.num_groups * grid.count:
        raise CheckpointDamaged(f"{what} has a table of cells of another size")
    return grid


def stretch_of(grid: Grid, start: int, stop: int, at: int) -> Stretch:
    """Bytes [start, stop) of a tensor as they lie in a block, from `at` on."""
    return Stretch(
        at=at,
        num_bytes=stop - start,
        start=start,
        num_rows=grid.num_rows,
        band_bytes=grid.band_bytes,
        num_bands=grid.count,
        rows_per_cell=grid.rows,
    )


def join(grid: Grid, written: Iterable[CellsWritten]) -> Bands:
    """The table of a tensor from what all blocks added."""
    table = grid.zeros(0, grid.num_groups)
    for one in written:
        crcs = tables.unpack(one.crcs, one.name)
        table[one.first * grid.count :][: len(crcs)] ^= crcs
    return Bands(count=grid.count, rows=grid.rows, crc32c=tables.pack(table))
