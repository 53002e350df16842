"""Checksums of columns: a tensor seen as rows, cut into bands of columns and groups of rows, with a CRC32C per cell.

A reader that wants a few columns of every row (a shard of an inner dim) checks exactly what it reads; chunks would make it read whole rows.
Pure but for checksums of memory at hand; the block writer adds cells, the manifest carries them, the reader uses them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from argosy.checkpoint import checksums, tables
from argosy.checkpoint.checksums import Table
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


def cells_of_stretch(name: str, grid: Grid, start: int, stop: int, address: int) -> CellsWritten:
    """Linear CRCs of the cells that bytes [start, stop) of a tensor, which lie at an address, are part of."""
    total = grid.num_rows * grid.row_bytes
    first, last = start // grid.group_bytes, -(-stop // grid.group_bytes)
    found = np.zeros((last - first) * grid.count, dtype=np.uint32)
    inner_first = -(-start // grid.group_bytes)
    inner_last = last if stop == total else stop // grid.group_bytes
    if inner_first < inner_last:
        begin = inner_first * grid.group_bytes
        num_rows = (min(inner_last * grid.group_bytes, total) - begin) // grid.row_bytes
        crcs = checksums.of_cells(
            address + begin - start, num_rows, grid.band_bytes, grid.count, grid.rows
        )
        at = (inner_first - first) * grid.count
        found[at : at + len(crcs)] = crcs
    for group in {first, last - 1}:
        if not inner_first <= group < inner_last:
            found[(group - first) * grid.count :][: grid.count] = _partial(
                grid, group, start, stop, address
            )
    found ^= grid.zeros(first, last)
    return CellsWritten(name, first, tables.pack(found))


def _partial(grid: Grid, group: int, start: int, stop: int, address: int) -> Table:
    """A group of which only some bytes are here: the rest counts as zeros."""
    begin, num_rows = group * grid.group_bytes, grid.rows_of(group)
    image = np.zeros(num_rows * grid.row_bytes, dtype=np.uint8)
    low, high = max(start, begin), min(stop, begin + len(image))
    ctypes.memmove(image.ctypes.data + low - begin, address + low - start, high - low)
    return checksums.of_cells(image.ctypes.data, num_rows, grid.band_bytes, grid.count, grid.rows)


def join(grid: Grid, written: Iterable[CellsWritten]) -> Bands:
    """The table of a tensor from what all blocks added."""
    table = grid.zeros(0, grid.num_groups)
    for one in written:
        crcs = tables.unpack(one.crcs, one.name)
        table[one.first * grid.count :][: len(crcs)] ^= crcs
    return Bands(count=grid.count, rows=grid.rows, crc32c=tables.pack(table))
