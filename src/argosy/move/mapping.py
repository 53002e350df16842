"""One mapping of a memfd, and tensors whose storages lie in it.

A tensor keeps the mapping alive: the memory goes away with the last tensor, array or word of it, never before. Shared mappings are
read and written by all; private ones read the same pages and keep stray writes to themselves. Used by arenas.py and pools.py.
"""

from __future__ import annotations

import ctypes
import mmap
import operator
import weakref
from collections.abc import Callable, Sequence

import torch

from argosy.errors import ArenaGone, ConfigError
from argosy.move import hostmemory
from argosy.move.directory import Request

WORD_BYTES = 64
"""Distance of two words: a cache line each, so that waiting for one does not slow writing the next."""


class Mapping:
    """A memfd's bytes in this process."""

    def __init__(
        self, descriptor: int, size: int, *, is_private: bool, is_prefaulted: bool
    ) -> None:
        self.size = size
        self.is_private = is_private
        flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
        try:
            self._map = mmap.mmap(
                descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        except (OSError, ValueError) as failure:
            raise ArenaGone(
                f"{size} bytes of shared memory cannot be mapped: {failure}",
                fix="it may be sealed (open it as a reader) or smaller than it says",
            )
        # This export makes closing the map an error for as long as anything of it lives: torch itself holds no buffer.
        self._whole = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if is_prefaulted:
            # A private page must not be written: the write would make it a copy.
            hostmemory.populate(self._map, is_writing=not is_private)

    @property
    def memory(self) -> memoryview:
        """All bytes, as a view of the caller's own."""
        return memoryview(self._map)

    def tensor(
        self,
        offset: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        strides: Sequence[int] | None = None,
        *,
        when_freed: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """A tensor at an offset, with a storage of exactly its bytes; `when_freed` runs when that storage has died."""
        steps = contiguous_strides(shape) if strides is None else tuple(strides)
        num_bytes = span_bytes(shape, steps, dtype)
        if num_bytes == 0:
            return torch.empty_strided(tuple(shape), steps, dtype=dtype)
        return torch.empty(0, dtype=dtype).set_(
            self.storage(offset, num_bytes, when_freed=when_freed), 0, tuple(shape), steps
        )

    def storage(
        self, offset: int, num_bytes: int, *, when_freed: Callable[[], None] | None = None
    ) -> torch.UntypedStorage:
        """A storage over bytes of the mapping."""
        if offset < 0 or offset + num_bytes > self.size:
            raise ArenaGone(f"bytes {offset} to {offset + num_bytes} of a mapping of {self.size}")
        piece = self._whole[offset : offset + num_bytes]
        if when_freed is not None:
            # The storage holds this view and nobody else does: it dies with the storage.
            weakref.finalize(piece, when_freed).atexit = False
        return torch.frombuffer(piece, dtype=torch.uint8).untyped_storage()

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor's elements lie here; one without elements lies everywhere."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        num_bytes = span_bytes(tensor.shape, tensor.stride(), tensor.dtype)
        start = tensor.data_ptr() - self.address
        return num_bytes == 0 or (start >= 0 and start + num_bytes <= self.size)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where a tensor of this mapping begins."""
        return tensor.data_ptr() - self.address


class Words:
    """A named array of shared 32-bit words, one to a cache line; `words[i]` is an address that lives as long as this object."""

    def __init__(self, mapping: Mapping, offset: int, count: int) -> None:
        self._mapping = mapping
        self._count = count
        self.address = mapping.address + offset

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"word {index} of {self._count}")
        return self.address + index * WORD_BYTES


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a plain tensor of this shape."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(1, size)
    return tuple(reversed(steps))


def span_bytes(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if any(size == 0 for size in shape):
        return 0
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    return (last + 1) * dtype.itemsize


def has_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices may name one element (expanded, or strides that fold onto each other)."""
    dims = sorted((step, size) for size, step in zip(shape, strides, strict=True) if size > 1)
    reach = 0
    for step, size in dims:
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def request_for(
    shape: Sequence[int], dtype: torch.dtype, name: str, strides: Sequence[int] | None
) -> Request:
    """Check a tensor's description and turn it into an allocation."""
    label = name or "an unnamed tensor"
    try:
        sizes = tuple(map(operator.index, shape))
        steps = (
            contiguous_strides(sizes) if strides is None else tuple(map(operator.index, strides))
        )
    except TypeError:
        raise ConfigError(f"{label}: shape {shape}, strides {strides}", fix="use whole numbers")
    if any(size < 0 for size in sizes) or any(step < 0 for step in steps):
        raise ConfigError(f"{label}: shape {sizes}, strides {steps}", fix="use sizes from 0 up")
    if len(steps) != len(sizes):
        raise ConfigError(f"{label}: {len(sizes)} dims and {len(steps)} strides", fix="one each")
    if has_overlap(sizes, steps):
        raise ConfigError(
            f"{label}: strides {steps} of shape {sizes} put two elements in one place",
            fix="leave the strides out, or take those of a dense tensor",
        )
    return Request(
        num_bytes=span_bytes(sizes, steps, dtype),
        name=name,
        dtype=str(dtype).removeprefix("torch."),
        shape=sizes,
        strides=steps,
    )
