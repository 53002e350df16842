"""CRC32C of memory: of bytes at hand, of bytes at an address, of each chunk of a block, of the cells of matrices in it; with the block brought together on the way.

Native code where there is some (it releases the GIL), numpy otherwise. No torch: the writer process and the command line call this.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from argosy.move import crc32c
from argosy.native import loader

Table = npt.NDArray[np.uint32]
Piece = tuple[int, int]
"""Address and number of bytes that lie together."""


class Stretch(NamedTuple):
    """Bytes of a block, from `at` on, that are part of a matrix of bytes, there from `start` on; cut into cells as by `of_cells`."""

    at: int
    num_bytes: int
    start: int
    num_rows: int
    band_bytes: int
    num_bands: int
    rows_per_cell: int

    @property
    def first_group(self) -> int:
        """The first row of cells that it has bytes of."""
        return self.start // (self.band_bytes * self.num_bands * self.rows_per_cell)

    @property
    def num_cells(self) -> int:
        """Of which it has bytes, and their neighbours to the left and right."""
        group_bytes = self.band_bytes * self.num_bands * self.rows_per_cell
        last = -(-(self.start + self.num_bytes) // group_bytes)
        return (last - self.first_group) * self.num_bands


def of_bytes(data: bytes | bytearray | memoryview) -> int:
    """The CRC32C of a buffer."""
    array = np.frombuffer(data, dtype=np.uint8)
    return of_memory(array.ctypes.data, array.size) if array.size else 0


def of_memory(address: int, num_bytes: int) -> int:
    """The CRC32C of memory that the caller keeps alive."""
    return _kernel()(address, num_bytes)


def of_chunks(address: int, num_bytes: int, chunk_bytes: int) -> Table:
    """The CRC32C of each chunk; the last one may be shorter."""
    whole, rest = divmod(num_bytes, chunk_bytes)
    found = of_cells(address, whole, chunk_bytes, 1, 1)
    if rest:
        found = np.append(found, np.uint32(of_memory(address + num_bytes - rest, rest)))
    return found


def of_cells(
    address: int, num_rows: int, band_bytes: int, num_bands: int, rows_per_cell: int
) -> Table:
    """The CRC32C of each cell of a matrix of bytes: `num_bands` bands to a row, `rows_per_cell` rows to a cell, the last cells of what is left."""
    found = np.zeros(-(-num_rows // rows_per_cell) * num_bands, dtype=np.uint32)
    native = loader.library()
    if native is not None:
        native.ag_crc32c_cells(
            address, num_rows, band_bytes, num_bands, rows_per_cell, found.ctypes.data
        )
        return found
    kernel, width = _kernel(), band_bytes * num_bands
    for cell in range(len(found)):
        group, band = divmod(cell, num_bands)
        first, last = group * rows_per_cell, min(num_rows, (group + 1) * rows_per_cell)
        if num_bands == 1:
            found[cell] = kernel(address + first * width, (last - first) * width)
            continue
        rows = np.ctypeslib.as_array(
            (ctypes.c_uint8 * ((last - first) * width)).from_address(address + first * width)
        ).reshape(last - first, width)
        mine = np.ascontiguousarray(rows[:, band * band_bytes : (band + 1) * band_bytes])
        found[cell] = crc32c.extend(0, mine.reshape(-1))
    return found


def of_block(
    address: int, num_bytes: int, chunk_bytes: int, stretches: Sequence[Stretch]
) -> tuple[Table, list[Table]]:
    """Linear CRC32Cs of each chunk, and in the same pass of the cells of each stretch, whose other bytes count as zeros; without native code of chunks alone."""
    if loader.library() is None:
        found = of_chunks(address, num_bytes, chunk_bytes)
        return found ^ of_zero_chunks(num_bytes, chunk_bytes), []
    return _by_pieces(None, [(address, num_bytes)], chunk_bytes, stretches)


def of_gathered(
    address: int, pieces: Sequence[Piece], chunk_bytes: int, stretches: Sequence[Stretch]
) -> tuple[Table, list[Table]]:
    """As `of_block`, of the pieces one after another, which are copied to an address on the way: each byte is read once, and what is summed is what is there."""
    if loader.library() is not None:
        return _by_pieces(address, pieces, chunk_bytes, stretches)
    at = address
    for start, num_bytes in pieces:
        ctypes.memmove(at, start, num_bytes)
        at += num_bytes
    return of_block(address, at - address, chunk_bytes, stretches)


def of_pieces(pieces: Sequence[Piece], chunk_bytes: int) -> Table:
    """As `of_chunks`, of pieces one after another, where they lie."""
    if loader.library() is None:
        data = np.frombuffer(b"".join(map(ctypes.string_at, *zip(*pieces, strict=True))), np.uint8)
        return of_chunks(data.ctypes.data, data.size, chunk_bytes)
    found, _ = _by_pieces(None, pieces, chunk_bytes, [])
    return found ^ of_zero_chunks(sum(size for _, size in pieces), chunk_bytes)


def _by_pieces(
    address: int | None,
    pieces: Sequence[Piece],
    chunk_bytes: int,
    stretches: Sequence[Stretch],
) -> tuple[Table, list[Table]]:
    native = loader.library()
    assert native is not None
    num_bytes = sum(size for _, size in pieces)
    chunks = np.zeros(-(-num_bytes // chunk_bytes), dtype=np.uint32)
    sizes = [one.num_cells for one in stretches]
    *starts, total = itertools.accumulate(sizes, initial=0)
    cells = np.zeros(total, dtype=np.uint32)
    told = np.array(
        [(*one, start) for one, start in zip(stretches, starts, strict=True)], dtype=np.int64
    )
    places = np.array(pieces, dtype=np.int64)
    native.ag_gather_crc32c(
        address,
        places.ctypes.data,
        len(pieces),
        chunk_bytes,
        chunks.ctypes.data,
        told.ctypes.data,
        len(stretches),
        cells.ctypes.data,
    )
    return chunks, [cells[at : at + size] for at, size in zip(starts, sizes, strict=True)]


def table_of(crcs: list[int]) -> Table:
    """CRCs as a table."""
    return np.array(crcs, dtype=np.uint32)


@functools.lru_cache(maxsize=256)
def of_zeros(num_bytes: int) -> int:
    """The CRC32C of so many zero bytes."""
    if num_bytes == 0:
        return 0
    with mmap.mmap(-1, num_bytes) as zeros:
        view = np.frombuffer(zeros, dtype=np.uint8)
        found = of_memory(view.ctypes.data, num_bytes)
        del view
    return found


def of_zero_chunks(num_bytes: int, chunk_bytes: int) -> Table:
    """What `of_chunks` gives for zeros: what linear CRCs are taken against."""
    whole, rest = divmod(num_bytes, chunk_bytes)
    found = np.full(whole + bool(rest), of_zeros(chunk_bytes) if whole else 0, dtype=np.uint32)
    if rest:
        found[-1] = of_zeros(rest)
    return found


@functools.cache
def _kernel() -> Callable[[int, int], int]:
    native = loader.library()
    if native is None:
        return _by_numpy
    call = native.ag_copy_crc32c

    def by_native(address: int, num_bytes: int) -> int:
        return int(call(None, address, num_bytes, 0))

    return by_native


def _by_numpy(address: int, num_bytes: int) -> int:
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return crc32c.extend(0, np.ctypeslib.as_array(memory))
