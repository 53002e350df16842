"""Chunk tables: one CRC32C per chunk of a file, as text in the manifest, and joined from what several processes wrote.

A CRC is linear: the CRC of a chunk, taken against that of zeros, is the exclusive or of those of its parts with zeros elsewhere. So processes
that share a chunk need not see each other's bytes. Pure; used by the writer, the votes and the reader.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

import msgspec
import numpy as np

from argosy.checkpoint import directio
from argosy.checkpoint.checksums import Table, of_zero_chunks
from argosy.errors import CheckpointDamaged

CHUNK_BYTES = 1 << 16
BLOCK_BYTES = directio.BLOCK_BYTES
"""Unit of writing and the largest chunk; chunk sizes divide it."""
SMALLEST_CHUNK = 4096
_MOST_CHUNKS = 1 << 20


class CellsWritten(msgspec.Struct, frozen=True, array_like=True):
    """What one block adds to the cells (bands.py) of one tensor: linear CRCs of groups of rows from `first` on."""

    name: str
    first: int
    crcs: str


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What one process wrote of one block: how many of its bytes, and the linear CRC of each chunk."""

    file: str
    start: int
    num_bytes: int
    crcs: str
    cells: tuple[CellsWritten, ...] = ()


def num_chunks(size: int, chunk_bytes: int) -> int:
    """Entries of a table."""
    return -(-size // chunk_bytes)


def chunk_bytes_for(size: int) -> int:
    """The usual chunk, larger ones where the table would become long."""
    chunk = CHUNK_BYTES
    while num_chunks(size, chunk) > _MOST_CHUNKS and chunk < BLOCK_BYTES:
        chunk *= 2
    return chunk


def pack(table: Table) -> str:
    """A table as text."""
    return base64.b64encode(table.astype("<u4").tobytes()).decode("ascii")


def unpack(text: str, what: str) -> Table:
    """A table from its text."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b"?"
    if len(data) % 4:
        raise CheckpointDamaged(
            f"the checksums of {what} are no table", fix="use another checkpoint"
        )
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


def join(size: int, chunk_bytes: int, written: Iterable[Written]) -> Table:
    """The table of a file from everything that was written; CheckpointDamaged when that is not all of it, or too much."""
    table = of_zero_chunks(size, chunk_bytes)
    covered: dict[int, int] = {}
    name = ""
    for one in written:
        name = one.file
        crcs = unpack(one.crcs, one.file)
        first = one.start // chunk_bytes
        stop = min(size, one.start + BLOCK_BYTES)
        if one.start % BLOCK_BYTES or len(crcs) != num_chunks(stop - one.start, chunk_bytes):
            raise CheckpointDamaged(f"{one.file}: {len(crcs)} checksums for a block at {one.start}")
        table[first : first + len(crcs)] ^= crcs
        covered[one.start] = covered.get(one.start, 0) + one.num_bytes
    for start in range(0, size, BLOCK_BYTES):
        wanted, found = min(size - start, BLOCK_BYTES), covered.get(start, 0)
        if wanted != found:
            raise CheckpointDamaged(
                f"{name or 'a file'}: {found} of {wanted} bytes of the block at {start} were written",
                fix="save again; the ranks' states do not cover the tensors in it exactly once",
            )
    return table
