"""The kernels on tensors: ordered reduction, tree sums, copy with checksum, changed elements.

Everybody who needs one of them calls it here: native code where there is some, the same order of operations by torch otherwise
(slices.py), so that only speed differs. Tensors are on the CPU and contiguous; anything else is refused by name, never copied silently.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch

from argosy.errors import ConfigError
from argosy.move import crc32c, slices
from argosy.native import loader

__all__ = [
    "OPERATIONS",
    "changed",
    "copy_crc32c",
    "path",
    "reduce",
    "reduce_pages",
    "reduce_tree",
]

OPERATIONS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "product": 4, "premul_sum": 5}
"""Operations of `reduce`, with their numbers in native code."""

DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.uint8: 4,
    torch.int8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}
"""Dtypes that can be reduced, with their numbers in native code."""

_TREE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DEEPEST = 64
_FIRST_ROOM = 4096


def path() -> str:
    """What computes here, for the numerics fingerprint: "avx2", "baseline", … or "torch operations"."""
    return loader.path()


def reduce(
    out: torch.Tensor, inputs: Sequence[torch.Tensor], operation: str = "sum", factor: float = 1.0
) -> None:
    """out = inputs[0] op inputs[1] op … in exactly this order; `out` may be one of the inputs.

    bfloat16 and float16 are accumulated in float32 and rounded once. "avg" divides by the number of inputs, "premul_sum" multiplies
    each by `factor` first; both take floating dtypes only. Integers wrap around.
    """
    _check_reduction(out, inputs, operation)
    native = loader.library()
    if native is None:
        slices.reduce(out.view(-1), [tensor.view(-1) for tensor in inputs], operation, factor)
        return
    status = native.ag_reduce(
        out.data_ptr(),
        _addresses(inputs),
        len(inputs),
        out.numel(),
        DTYPES[out.dtype],
        OPERATIONS[operation],
        factor,
    )
    assert status == loader.OK, f"ag_reduce: {status}"


def reduce_tree(out: torch.Tensor, inputs: Sequence[torch.Tensor], program: Sequence[int]) -> None:
    """out = the sum in the order of `program` (postfix: i pushes inputs[i], -1 adds the two topmost), in float32.

    Inputs are float32, bfloat16 or float16; `out` is float32 and may be one of the inputs. Programs come from trees.py.
    """
    _check_tree(out, inputs)
    instructions = _checked_program(tuple(program), len(inputs))
    native = loader.library()
    if native is None:
        slices.reduce_tree(out.view(-1), [tensor.view(-1) for tensor in inputs], program)
        return
    status = native.ag_reduce_tree(
        out.data_ptr(),
        _addresses(inputs),
        len(inputs),
        instructions,
        len(program),
        out.numel(),
        DTYPES[inputs[0].dtype],
    )
    assert status == loader.OK, f"ag_reduce_tree: {status}"


def reduce_pages(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    program: Sequence[int],
    bounds: Sequence[tuple[int, int]],
) -> list[float]:
    """`reduce_tree` of float32 over the pages [start, stop) of flat tensors; the sum of squares of each page of the result.

    The squares are added in float64 in an order that depends on the page alone; they are finite when all its elements are.
    """
    _check_tree(out, inputs)
    if inputs[0].dtype != torch.float32:
        raise ConfigError(f"inputs are {inputs[0].dtype}", fix="pages are added in float32")
    instructions = _checked_program(tuple(program), len(inputs))
    places = _checked_places(tuple(bounds), out.numel())
    native = loader.library()
    if native is None:
        flat = [tensor.view(-1) for tensor in inputs]
        return [slices.reduce_page(out.view(-1), flat, program, *bound) for bound in bounds]
    squares = (ctypes.c_double * len(bounds))()
    status = native.ag_reduce_pages(
        out.data_ptr(),
        _addresses(inputs),
        len(inputs),
        instructions,
        len(program),
        places,
        len(bounds),
        squares,
    )
    assert status == loader.OK, f"ag_reduce_pages: {status}"
    return list(squares)


def copy_crc32c(dst: torch.Tensor | None, src: torch.Tensor, crc: int = 0) -> int:
    """Copy the bytes of `src` to `dst` (None: checksum alone) and continue the CRC32C `crc` over them."""
    _check("src", src)
    num_bytes = src.numel() * src.element_size()
    if dst is not None:
        _check("dst", dst)
        room = dst.numel() * dst.element_size()
        if room != num_bytes:
            raise ConfigError(
                f"dst has {room} bytes, src {num_bytes}", fix="give tensors of equal size"
            )
    native = loader.library()
    if native is not None:
        target = None if dst is None else dst.data_ptr()
        return int(native.ag_copy_crc32c(target, src.data_ptr(), num_bytes, crc))
    data = src.detach().view(-1).view(torch.uint8)
    if dst is not None:
        dst.detach().view(-1).view(torch.uint8).copy_(data)
        data = dst.detach().view(-1).view(torch.uint8)
    return crc32c.extend(crc, data.numpy())


def changed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Flat indices (int64, ascending) of the elements whose bytes differ: two zeros of different sign do, equal NaNs do not."""
    _check("a", a)
    _check("b", b)
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ConfigError(
            f"a is {_describe(a)}, b is {_describe(b)}",
            fix="compare tensors of one shape and dtype",
        )
    if a.element_size() not in (1, 2, 4, 8):
        raise ConfigError(f"elements of {a.dtype} cannot be compared", fix="view them as float64")
    native = loader.library()
    if native is None:
        return slices.changed(a.detach().view(-1), b.detach().view(-1))
    room = min(a.numel(), _FIRST_ROOM)
    while True:
        found = torch.empty(room, dtype=torch.int64)
        count = native.ag_changed(
            a.data_ptr(), b.data_ptr(), a.numel(), a.element_size(), found.data_ptr(), room
        )
        # Memory that others write to may differ in more places the second time.
        if count <= room:
            return found[:count].clone() if count * 2 < room else found[:count]
        room = min(a.numel(), count + count // 8)


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous():
        return
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise ConfigError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}",
            fix="give a dense tensor on the CPU",
        )
    raise ConfigError(
        f"{name} is not contiguous: {_describe(tensor)} with strides {list(tensor.stride())}",
        fix=f"pass {name}.contiguous(), or the part of it that is one piece of memory",
    )


def _check_all(out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    if not inputs:
        raise ConfigError("nothing to reduce: inputs is empty", fix="give one tensor or more")
    _check("out", out)
    count = out.numel()
    for index, tensor in enumerate(inputs):
        _check(f"inputs[{index}]", tensor)
        if tensor.numel() != count:
            raise ConfigError(
                f"inputs[{index}] is {_describe(tensor)}, out is {_describe(out)}",
                fix="give tensors of one size",
            )
        if tensor.dtype != inputs[0].dtype:
            raise ConfigError(
                f"inputs[{index}] is {_describe(tensor)}, inputs[0] is {_describe(inputs[0])}",
                fix="give inputs of one dtype",
            )


def _check_reduction(out: torch.Tensor, inputs: Sequence[torch.Tensor], operation: str) -> None:
    _check_all(out, inputs)
    if out.dtype != inputs[0].dtype or out.dtype not in DTYPES:
        raise ConfigError(
            f"cannot reduce {_describe(inputs[0])} into {_describe(out)}",
            fix="use one dtype of " + ", ".join(str(known)[6:] for known in DTYPES),
        )
    if operation not in OPERATIONS:
        raise ConfigError(f"no operation {operation!r}", fix=f"use one of {', '.join(OPERATIONS)}")
    if operation in ("avg", "premul_sum") and not out.dtype.is_floating_point:
        raise ConfigError(
            f"{operation} of {_describe(out)}: integers have none",
            fix="use sum, or convert to a floating dtype",
        )


def _check_tree(out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
    _check_all(out, inputs)
    if out.dtype != torch.float32 or inputs[0].dtype not in _TREE_DTYPES:
        raise ConfigError(
            f"cannot add {_describe(inputs[0])} in a tree into {_describe(out)}",
            fix="use float32, bfloat16 or float16 inputs and a float32 out",
        )


@functools.lru_cache(maxsize=64)
def _checked_places(
    bounds: tuple[tuple[int, int], ...], num_elements: int
) -> ctypes.Array[ctypes.c_int64]:
    """Bounds of pages as native code reads them."""
    places = [place for bound in bounds for place in bound]
    if places and not (min(places) >= 0 and max(places) <= num_elements):
        raise ConfigError(f"pages beyond the {num_elements} elements", fix="give pages of `out`")
    return (ctypes.c_int64 * len(places))(*places)


@functools.lru_cache(maxsize=256)
def _checked_program(program: tuple[int, ...], num_inputs: int) -> ctypes.Array[ctypes.c_int32]:
    """The program as native code reads it; the same few are used in every step."""
    held = deepest = 0
    for entry in program:
        if entry == -1 and held >= 2:
            held -= 1
        elif 0 <= entry < num_inputs:
            held += 1
        else:
            held = -1
            break
        deepest = max(deepest, held)
    if held != 1 or deepest > _DEEPEST:
        raise ConfigError(
            f"{list(program)} is no postfix sum over {num_inputs} inputs",
            fix="make programs with trees.program()",
        )
    return (ctypes.c_int32 * len(program))(*program)
