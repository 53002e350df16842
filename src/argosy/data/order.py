"""Order: a shuffle of any size with random access and no memory.

A Feistel network over pairs (left, right) with left * right just above the size; results beyond the size are enciphered
again (cycle walking), which keeps it a bijection. Pure, and a function of its arguments alone: golden values in the tests
hold the bits, because a run's order must be the same in every process, on every machine and in every later version.
"""

from __future__ import annotations

import hashlib
import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]

ORDER_VERSION = 1
MAX_SIZE = 1 << 62
_ROUNDS = 6
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_ONE, _SHIFTS = np.uint64(1), (np.uint64(30), np.uint64(27), np.uint64(31))


class Permutation:
    """A bijection of [0, size) chosen by the key; `permutation(positions)` maps a whole row at once."""

    __slots__ = ("_keys", "_left", "_right", "size")

    def __init__(self, size: int, *key: int | str) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"a permutation of {size} elements")
        self.size = size
        left = math.isqrt(size - 1) + 1
        self._left = np.uint64(left)
        self._right = np.uint64(-(-size // left))
        self._keys = derive_words(_ROUNDS, "order", ORDER_VERSION, size, *key)

    def __call__(self, positions: npt.ArrayLike) -> Integers:
        """Where the elements at these positions come from; positions lie in [0, size)."""
        words = np.asarray(positions, dtype=np.int64).astype(np.uint64)
        flat = self._encipher(words.reshape(-1))
        outside = np.flatnonzero(flat >= self.size)
        while outside.size:
            flat[outside] = self._encipher(flat[outside])
            outside = outside[flat[outside] >= self.size]
        return flat.astype(np.int64).reshape(words.shape)

    def _encipher(self, words: Words) -> Words:
        left, right = np.divmod(words, self._right)
        for round_number in range(0, _ROUNDS, 2):
            # Without its lowest bit a scrambled word leaves room for the addition.
            left = (left + (scramble(right + self._keys[round_number]) >> _ONE)) % self._left
            right = (right + (scramble(left + self._keys[round_number + 1]) >> _ONE)) % self._right
        result: Words = left * self._right + right
        return result


def derive_words(count: int, *parts: int | str) -> Words:
    """`count` (at most 8) unsigned 64-bit words fixed by the parts; different parts never collide by concatenation."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=64).digest()
    return np.frombuffer(digest, dtype="<u8", count=count).astype(np.uint64)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) fixed by the parts."""
    return int(derive_words(1, *parts)[0]) >> 1


def scramble(words: Words) -> Words:
    """Well mixed words, in place; different words stay different. Unsigned arithmetic wraps on purpose."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        words ^= words >> shift
        words *= multiplier
    words ^= words >> _SHIFTS[2]
    return words
