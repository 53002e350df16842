"""Copies of rows between two strided tensors, and of memory by address, by native code; torch's or the system's own copy where there is none.

Used by copies.py and the checkpoint's copies in and out: others read the destination before they overwrite it, short rows and blocks of some MiB alike. Both
ways give the same bytes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from argosy.native import loader

_NUMBER = ctypes.c_int64
_POINTER = ctypes.c_void_p
_FLAG = ctypes.c_int32
_FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ag_copy_rows": (
        None,
        (_POINTER, _POINTER, _NUMBER, _FLAG, _POINTER, _POINTER, _POINTER, _FLAG),
    )
}
_LEAST_ROW_BYTES = 32
_LEAST_STREAMED_BYTES = 1 << 18


def copy_rows(into: torch.Tensor, source: torch.Tensor, *, is_streamed: bool) -> None:
    """into[...] = source: equal shapes and dtypes, memories that do not overlap.

    `is_streamed`: so much is moved in all that caching the destination is of no use.
    """
    native = _library()
    size = into.element_size()
    dims = into.dim()
    has_rows = dims > 0 and into.stride(dims - 1) == source.stride(dims - 1) == 1
    if native is None or not has_rows or into.shape[dims - 1] * size < _LEAST_ROW_BYTES:
        into.copy_(source)
        return
    outer = dims - 1
    numbers = _NUMBER * max(1, outer)
    native.ag_copy_rows(
        into.data_ptr(),
        source.data_ptr(),
        into.shape[outer] * size,
        outer,
        numbers(*into.shape[:outer]),
        numbers(*(stride * size for stride in into.stride()[:outer])),
        numbers(*(stride * size for stride in source.stride()[:outer])),
        int(is_streamed),
    )


def copy_bytes(into: int, source: int, num_bytes: int) -> None:
    """Memory to memory by address, which do not overlap; past the caches where much is moved: nobody reads it soon."""
    native = _library() if num_bytes >= _LEAST_STREAMED_BYTES else None
    if native is None:
        ctypes.memmove(into, source, num_bytes)
    else:
        native.ag_copy_rows(into, source, num_bytes, 0, None, None, None, 1)


@functools.lru_cache(maxsize=4)
def _declared(native: ctypes.CDLL) -> Any:
    try:
        loader.declare(native, _FUNCTIONS)
    except AttributeError:
        return None  # an object of before these functions were there
    return native


def _library() -> Any:
    native = loader.library()
    return None if native is None else _declared(native)
