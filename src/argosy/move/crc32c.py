"""CRC32C by numpy, where there is no native code: many stretches of the bytes at once, joined afterwards.

Only kernels.py calls this. A CRC is linear: the state after some bytes is the old state moved past as many zero bytes, plus (without
carry) the state that those bytes alone give. So stretches of equal length are computed side by side and joined in pairs.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_STRETCH_BYTES = 64
_MOST_STRETCHES = 8192


def extend(crc: int, data: npt.NDArray[np.uint8]) -> int:
    """Continue `crc` (0 at the beginning) over the bytes of a flat array."""
    state = ~crc & 0xFFFF_FFFF
    position, size = 0, data.size
    while size - position >= _STRETCH_BYTES:
        doublings = min(_MOST_STRETCHES, (size - position) // _STRETCH_BYTES).bit_length() - 1
        num_bytes = _STRETCH_BYTES << doublings
        piece = data[position : position + num_bytes]
        state = int(_move(np.uint32(state), doublings)) ^ _of_stretches(piece, doublings)
        position += num_bytes
    table = _byte_tables()[0]
    for byte in data[position:].tolist():
        state = (state >> 8) ^ int(table[(state ^ byte) & 0xFF])
    return ~state & 0xFFFF_FFFF


def _of_stretches(piece: npt.NDArray[np.uint8], doublings: int) -> int:
    """The state after `piece` alone, beginning from nothing."""
    tables = _byte_tables()
    columns = np.ascontiguousarray(piece.view("<u4").reshape(1 << doublings, -1).T)
    states: Words = np.zeros(1 << doublings, dtype=np.uint32)
    for column in columns:
        states = _look_up(states ^ column, tables[::-1])
    for level in range(doublings):
        states = _move(states[0::2], level) ^ states[1::2]
    return int(states[0])


def _move(states: Words | np.uint32, doublings: int) -> Words:
    """Past as many zero bytes as 2**doublings stretches have."""
    return _look_up(states, _zero_tables(doublings))


def _look_up(states: Words | np.uint32, tables: Words) -> Words:
    found: Words = (
        tables[0][states & 0xFF]
        ^ tables[1][(states >> 8) & 0xFF]
        ^ tables[2][(states >> 16) & 0xFF]
        ^ tables[3][states >> 24]
    )
    return found


@functools.cache
def _byte_tables() -> Words:
    """What a byte gives, with 0 to 3 more bytes behind it."""
    first: Words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, (first >> 1) ^ np.uint32(_POLYNOMIAL), first >> 1)
    tables = [first]
    for _ in range(3):
        tables.append((tables[-1] >> 8) ^ first[tables[-1] & 0xFF])
    return np.stack(tables)


@functools.cache
def _zero_tables(doublings: int) -> Words:
    """For each byte of a state: where it is after the zero bytes of 2**doublings stretches."""
    states: Words = np.arange(256, dtype=np.uint32) << np.array([[0], [8], [16], [24]], np.uint32)
    if doublings:
        return _move(_move(states, doublings - 1), doublings - 1)
    first = _byte_tables()[0]
    for _ in range(_STRETCH_BYTES):
        states = (states >> 8) ^ first[states & 0xFF]
    return states
