"""CRC32C of memory: of bytes at hand, of bytes at an address, of each chunk of a block.

Native code where there is some (it releases the GIL), numpy otherwise. No torch: the writer process and the command line call this.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from argosy.move import crc32c
from argosy.native import loader

Table = npt.NDArray[np.uint32]


def of_bytes(data: bytes | bytearray | memoryview) -> int:
    """The CRC32C of a buffer."""
    array = np.frombuffer(data, dtype=np.uint8)
    return of_memory(array.ctypes.data, array.size) if array.size else 0


def of_memory(address: int, num_bytes: int) -> int:
    """The CRC32C of memory that the caller keeps alive."""
    return _kernel()(address, num_bytes)


def of_chunks(address: int, num_bytes: int, chunk_bytes: int) -> Table:
    """The CRC32C of each chunk; the last one may be shorter."""
    kernel = _kernel()
    starts = range(0, num_bytes, chunk_bytes)
    found = [kernel(address + at, min(chunk_bytes, num_bytes - at)) for at in starts]
    return table_of(found)


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
