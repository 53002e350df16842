"""One collective call as plain data: what kind, of what, from where to where. Pure: moves nothing and waits for nobody.

groups.py makes calls from torch's arguments; the routes (nativeroute.py, torchroute.py, hostroute.py) carry them out;
verdicts.py tells people about them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


class Kind(enum.IntEnum):
    """Numbers as in native/collectives.h."""

    MEET = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8


class Operation(enum.IntEnum):
    """Numbers as in native/kernels.h."""

    SUM = 0
    AVG = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    PREMUL_SUM = 5
    # Without a kernel here: Gloo's alone.
    BAND = 16
    BOR = 17
    BXOR = 18


REDUCING = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE})
_ROOTED = frozenset({Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER})

# What native/reduce.c adds up; all other dtypes can only be copied.
_KERNELS = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
_BITWISE = (torch.uint8, torch.int8, torch.int32, torch.int64)
_COPIED = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and value not in _KERNELS
    },
    key=str,
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_KERNELS)} | {
    dtype: code for code, dtype in enumerate(_COPIED, start=16)
}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


def can_reduce(dtype: torch.dtype, operation: Operation) -> bool:
    """Whether the routes have a kernel for this; Gloo may have one otherwise."""
    if operation > Operation.PREMUL_SUM or dtype not in _KERNELS:
        return False
    if operation in (Operation.AVG, Operation.PREMUL_SUM):
        return dtype.is_floating_point
    return True


def can_gloo_reduce(dtype: torch.dtype, operation: Operation) -> bool:
    """Whether Gloo has one where the routes have none. What it cannot do it may refuse after it has written."""
    if dtype is torch.bool:
        return operation not in (Operation.AVG, Operation.PREMUL_SUM)
    if dtype.is_complex:
        is_average = operation is Operation.AVG and dtype is not torch.complex32
        return operation is Operation.SUM or is_average
    return operation > Operation.PREMUL_SUM and dtype in _BITWISE


@dataclass(slots=True)
class Call:
    """Tensors are contiguous and on the CPU; parts in rank order, all of `count` elements except in an all-to-all."""

    kind: Kind
    dtype: torch.dtype
    count: int
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    operation: Operation = Operation.SUM
    factor: float = 1.0
    root: int = 0
    site: str = ""
    is_beneath: bool = False
    """Only a meeting, so that all are known to call the same; Gloo then does the work."""
    ranks: Sequence[int] = ()
    """The program's own numbers of the group's ranks, for texts."""
    label: str = ""
    """What people are told where this is only a part of what they have called."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one part."""
        return self.count * self.dtype.itemsize

    @property
    def moved_bytes(self) -> int:
        """Bytes of this rank's tensors that take part."""
        return sum(
            tensor.nbytes if tensor.layout is torch.strided else tensor._nnz() * tensor.itemsize
            for tensor in self.inputs or self.outputs
        )

    def what(self) -> int:
        """The descriptor's first word."""
        operation = int(self.operation) if self.kind in REDUCING else 0
        kind = int(self.kind) | (0x80 if self.is_beneath else 0)
        return kind << 48 | DTYPE_CODES[self.dtype] << 40 | operation << 32 | self.root

    def __str__(self) -> str:
        return self.label or describe(self.what(), self.count, self.ranks)


def describe(what: int, count: int, ranks: Sequence[int] = ()) -> str:
    """A descriptor for people: `all_reduce(sum) of 1024 x float32`; `ranks` are the program's own numbers of the group's."""
    kind = Kind(what >> 48 & 0x7F)
    if kind is Kind.MEET and not what >> 55 & 1:
        return "barrier"
    dtype = str(_DTYPES.get(what >> 40 & 0xFF, "?")).removeprefix("torch.")
    text = kind.name.lower()
    if kind in REDUCING:
        text += f"({Operation(what >> 32 & 0xFF).name.lower()})"
    text += f" of {dtype}" if kind is Kind.ALL_TO_ALL else f" of {count} x {dtype}"
    root = what & 0xFFFFFFFF
    return text + (f", root {ranks[root] if ranks else root}" if kind in _ROOTED else "")
