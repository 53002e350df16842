"""One copy of a plan, done: a strided pass from a source's memory to a destination tensor, cast on the way.

Reads either memory that this process has mapped, or another process's own memory through the kernel. Staging happens only where a value must pass
through a wire dtype or be cast after a kernel read, in blocks of a bounded size. Called by reshard; knows no ranks and waits for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np
import torch

from argosy.move.plans import Copy
from argosy.move.regions import Addresses, read_process
from argosy.move.rows import copy_rows

BLOCK_ELEMENTS = 1 << 20
"""Staging holds at most so many elements."""
_TILE = 128
_LONGEST_RUN_BYTES = 64 << 20


def copy_mapped(
    copy: Copy,
    target: torch.Tensor,
    memory: torch.Tensor,
    wire: torch.dtype | None,
    *,
    is_streamed: bool = False,
) -> None:
    """Copy from `memory`, the source's elements as one flat tensor; `wire` rounds values on the way when it is given.

    `is_streamed`: this is part of a transfer that is larger than the caches.
    """
    into = _view(target, copy.sizes, copy.strides, copy.start)
    source = _view(memory, copy.sizes, copy.source_strides, copy.source_start)
    if wire is not None:
        for block in blocks(copy.sizes, BLOCK_ELEMENTS):
            into[block].copy_(source[block].to(wire))
        return
    into, source = _simplified(into, source)
    if into.dim() > 1 and _order(into) != _order(source):
        # Rows of the one are columns of the other: small tiles stay in the cache, whole columns do not.
        for block in blocks(into.shape, _TILE * _TILE, square=True):
            into[block].copy_(source[block])
        return
    if into.dtype == source.dtype:
        copy_rows(into, source, is_streamed=is_streamed)
    else:
        into.copy_(source)


def copy_from_process(
    copy: Copy, target: torch.Tensor, pid: int, address: int, source_dtype: torch.dtype
) -> None:
    """Copy from the memory of another process, whose local tensor begins at `address`; OSError when the kernel refuses."""
    into = _view(target, copy.sizes, copy.strides, copy.start)
    size = source_dtype.itemsize
    first = address + copy.source_start * size
    if source_dtype == target.dtype:
        run, outer = common_run(copy.sizes, copy.strides, copy.source_strides)
        theirs = _addresses(first, copy.sizes[:outer], copy.source_strides, size)
        ours = _addresses(into.data_ptr(), copy.sizes[:outer], copy.strides, size)
        _read(pid, theirs, ours, run * size)
        return
    staging = torch.empty(min(BLOCK_ELEMENTS, copy.volume), dtype=source_dtype)
    for block in blocks(copy.sizes, BLOCK_ELEMENTS):
        sizes = [part.stop - part.start for part in block]
        begin = sum(
            part.start * step for part, step in zip(block, copy.source_strides, strict=True)
        )
        room = staging[: math.prod(sizes)].view(sizes)
        run, outer = common_run(sizes, room.stride(), copy.source_strides)
        theirs = _addresses(first + begin * size, sizes[:outer], copy.source_strides, size)
        ours = _addresses(room.data_ptr(), sizes[:outer], room.stride(), size)
        _read(pid, theirs, ours, run * size)
        into[block].copy_(room)


def round_through(target: torch.Tensor, wire: torch.dtype, copy: Copy) -> None:
    """Round what a copy has written through a wire dtype, in place."""
    into = _view(target, copy.sizes, copy.strides, copy.start)
    for block in blocks(copy.sizes, BLOCK_ELEMENTS):
        into[block].copy_(into[block].to(wire))


def blocks(sizes: Sequence[int], most: int, *, square: bool = False) -> Iterator[tuple[slice, ...]]:
    """Cut a shape into blocks of at most `most` elements: along the outer dims first, or evenly in all dims when `square`."""
    steps = list(sizes)
    side = max(1, int(most ** (1 / max(1, sum(size > 1 for size in sizes)))))
    for dim in range(len(steps)):
        inner = math.prod(steps[dim + 1 :])
        if square:
            steps[dim] = min(steps[dim], side)
        elif inner * steps[dim] > most:
            steps[dim] = max(1, most // max(1, inner))
    ranges = [
        [slice(a, b) for a, b in pairwise([*range(0, size, step), size])]
        for size, step in zip(sizes, steps, strict=True)
    ]
    yield from product(*ranges)


def common_run(
    sizes: Sequence[int], first: Sequence[int], second: Sequence[int]
) -> tuple[int, int]:
    """(elements of a run that is contiguous in both memories, number of outer dims that runs are repeated over)"""
    run, outer = 1, len(sizes)
    while outer and (sizes[outer - 1] == 1 or first[outer - 1] == second[outer - 1] == run):
        outer -= 1
        run *= sizes[outer]
    return run, outer


def _read(pid: int, theirs: Addresses, ours: Addresses, run_bytes: int) -> None:
    if run_bytes <= _LONGEST_RUN_BYTES:
        read_process(pid, theirs, ours, run_bytes)
        return
    for begin in range(0, run_bytes, _LONGEST_RUN_BYTES):
        step, length = np.uint64(begin), min(_LONGEST_RUN_BYTES, run_bytes - begin)
        read_process(pid, theirs + step, ours + step, length)


def _addresses(first: int, sizes: Sequence[int], strides: Sequence[int], size: int) -> Addresses:
    """Where each run begins, in row-major order of the outer dims."""
    found = np.full((1,), first, dtype=np.uint64)
    for count, stride in zip(sizes, strides, strict=False):
        steps = np.arange(count, dtype=np.uint64) * np.uint64(stride * size)
        found = (found[:, None] + steps[None, :]).reshape(-1)
    return found


def _view(
    tensor: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], start: int
) -> torch.Tensor:
    return torch.as_strided(tensor, sizes, strides, tensor.storage_offset() + start)


def _simplified(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same pass with fewer dims: sizes of one dropped, dims joined that follow each other in both memories."""
    dims: list[list[int]] = []
    for size, one, two in zip(first.shape, first.stride(), second.stride(), strict=True):
        if size == 1:
            continue
        last = dims[-1] if dims else None
        if last is not None and last[1] == one * size and last[2] == two * size:
            dims[-1] = [last[0] * size, one, two]
        else:
            dims.append([size, one, two])
    sizes = [dim[0] for dim in dims]
    return (
        torch.as_strided(first, sizes, [dim[1] for dim in dims], first.storage_offset()),
        torch.as_strided(second, sizes, [dim[2] for dim in dims], second.storage_offset()),
    )


def _order(tensor: torch.Tensor) -> list[int]:
    """Dims from the widest to the narrowest stride."""
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
