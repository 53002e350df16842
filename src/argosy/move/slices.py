"""The kernels by torch operations, slice by slice so that what lies in between stays in the cache.

Only kernels.py calls this, where there is no native code, with flat tensors that it has checked. Operations, their order and their
roundings are those of native code; the bits of a NaN alone may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

SLICE_BYTES = 1 << 20
SQUARE_LANES = 16

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduce(
    out: torch.Tensor, inputs: Sequence[torch.Tensor], operation: str, factor: float
) -> None:
    """As `ag_reduce`."""
    is_half = out.dtype in (torch.bfloat16, torch.float16)
    wide = torch.float32 if is_half else out.dtype
    room = min(out.numel(), SLICE_BYTES // wide.itemsize)
    total, staged = torch.empty(room, dtype=wide), torch.empty(room, dtype=wide)
    for part in _parts(out.numel(), room):
        length = part.stop - part.start
        # The result is made apart and written last: out may be one of the inputs.
        running, place = total[:length], staged[:length]
        running.copy_(inputs[0][part])
        if operation == "premul_sum":
            running.mul_(factor)
        for tensor in inputs[1:]:
            value = tensor[part]
            if is_half or operation == "premul_sum":
                value = place.copy_(value)
            if operation == "premul_sum":
                value.mul_(factor)
            _fold(running, value, operation)
        if operation == "avg":
            running.div_(len(inputs))
        out[part] = running


def reduce_tree(out: torch.Tensor, inputs: Sequence[torch.Tensor], program: Sequence[int]) -> None:
    """As `ag_reduce_tree`."""
    room = min(out.numel(), SLICE_BYTES // 4)
    for part in _parts(out.numel(), room):
        stack: list[torch.Tensor] = []
        for entry in program:
            if entry >= 0:
                stack.append(inputs[entry][part].to(out.dtype))
            else:
                right = stack.pop()
                stack[-1] = stack[-1] + right
        out[part] = stack[0]


def reduce_page(
    out: torch.Tensor, inputs: Sequence[torch.Tensor], program: Sequence[int], start: int, stop: int
) -> float:
    """As `ag_reduce_pages`, one page."""
    page = out[start:stop]
    reduce_tree(page, [tensor[start:stop] for tensor in inputs], program)
    elements = page.detach().numpy()
    whole = elements.size - elements.size % SQUARE_LANES
    # Along its slow axis numpy adds row by row, which is the order of native code.
    rows = elements[:whole].reshape(-1, SQUARE_LANES).astype(np.float64)
    lanes = np.add.reduce(rows * rows, axis=0) if whole else np.zeros(SQUARE_LANES)
    rest = elements[whole:].astype(np.float64)
    lanes[: rest.size] += rest * rest
    total = 0.0
    for lane in lanes:
        total += float(lane)
    return total


def changed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As `ag_changed`, without a limit."""
    integer = _INTEGERS[a.element_size()]
    first, second = a.view(integer), b.view(integer)
    room = max(1, SLICE_BYTES // a.element_size())
    found = [
        (first[part] != second[part]).nonzero().flatten() + part.start
        for part in _parts(a.numel(), room)
    ]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)


def _fold(running: torch.Tensor, value: torch.Tensor, operation: str) -> None:
    if operation in ("sum", "avg", "premul_sum"):
        running.add_(value)
    elif operation == "product":
        running.mul_(value)
    else:
        # torch.minimum differs between its vector and its scalar code in which of the two zeros it takes.
        wins = value < running if operation == "min" else value > running
        if value.dtype.is_floating_point:
            wins |= value != value
        torch.where(wins, value, running, out=running)


def _parts(count: int, room: int) -> Iterator[slice]:
    for start in range(0, count, max(1, room)):
        yield slice(start, min(count, start + room))
