"""Two checkpoints compared tensor by tensor: how far apart, how many elements changed, and what should have moved and has not.

Files that the manifests prove equal are not read; the rest is read in stretches of bounded size, checked as always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import torch

from argosy.checkpoint import changes
from argosy.checkpoint.names import Kind
from argosy.checkpoint.opened import Lazy, Opened
from argosy.checkpoint.ranges import boxes_of_range

STRETCH_ELEMENTS = 1 << 20
_ORDERED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Progress = Callable[[int, int], None]


class TensorDiff(msgspec.Struct, frozen=True, kw_only=True):
    """How one tensor differs."""

    name: str
    kind: Kind
    max_abs: float
    """Infinite where one side is not a number and the other is."""
    max_ulp: float | None
    """Representable numbers between the two; None for what is no floating point."""
    changed_share: float
    num_elements: int


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """How two checkpoints differ."""

    changed: list[TensorDiff]
    unchanged: int
    only_first: list[str]
    only_second: list[str]
    reshaped: list[str]
    """In both, with another shape or dtype."""
    stuck: list[str]
    """Trained tensors that have not changed from the first to the second."""

    @property
    def is_equal(self) -> bool:
        """Nothing differs."""
        return not (self.changed or self.only_first or self.only_second or self.reshaped)


def diff(first: Opened, second: Opened, *, progress: Progress | None = None) -> Diff:
    """Compare two checkpoints."""
    old, new = first.manifest.tensors, second.manifest.tensors
    proven = set(changes.unchanged_tensors(first.manifest, second.manifest))
    shared = [name for name in old if name in new]
    reshaped = [n for n in shared if (old[n].dtype, old[n].shape) != (new[n].dtype, new[n].shape)]
    todo = [name for name in shared if name not in proven and name not in reshaped]
    total, done = sum(old[name].num_bytes for name in todo), 0
    changed = []
    for name in todo:
        found = compare(first.tensor(name), second.tensor(name), old[name].kind)
        if found.changed_share:
            changed.append(found)
        done += old[name].num_bytes
        if progress is not None:
            progress(done, total)
    still = {one.name for one in changed}
    same = [name for name in shared if name not in still and name not in reshaped]
    trained: set[str] = set()
    if second.step > first.step:
        trained = changes.trained_tensors(second.manifest, second.trees())
    return Diff(
        changed=changed,
        unchanged=len(same),
        only_first=sorted(old.keys() - new.keys()),
        only_second=sorted(new.keys() - old.keys()),
        reshaped=reshaped,
        stuck=[name for name in same if name in trained],
    )


def compare(first: Lazy, second: Lazy, kind: Kind) -> TensorDiff:
    """Two tensors of one class, shape and dtype, in stretches."""
    shape = tuple(first.shape)
    num_elements = math.prod(shape)
    max_abs, max_ulp, num_changed = 0.0, 0.0, 0
    for a, b in _stretches(first, second, shape, num_elements):
        bits_a, bits_b = _bits(a), _bits(b)
        is_changed = (bits_a != bits_b).reshape(a.numel(), -1).any(dim=1)
        count = int(is_changed.sum())
        if not count:
            continue
        num_changed += count
        flat_a, flat_b = a.reshape(-1)[is_changed], b.reshape(-1)[is_changed]
        max_abs = max(max_abs, _max_abs(flat_a, flat_b))
        if a.dtype.is_floating_point and a.element_size() in _ORDERED:
            max_ulp = max(max_ulp, _max_ulp(flat_a, flat_b))
    has_ulp = first.dtype.is_floating_point and first.dtype.itemsize in _ORDERED
    return TensorDiff(
        name=first.name,
        kind=kind,
        max_abs=max_abs,
        max_ulp=max_ulp if has_ulp else None,
        changed_share=num_changed / num_elements if num_elements else 0.0,
        num_elements=num_elements,
    )


def _stretches(
    first: Lazy, second: Lazy, shape: tuple[int, ...], num_elements: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, num_elements, STRETCH_ELEMENTS):
        for box in boxes_of_range(shape, start, min(num_elements, start + STRETCH_ELEMENTS)):
            yield first.read_box(box), second.read_box(box)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8).reshape(tensor.numel(), -1)


def _max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.is_complex():
        distance = (a.to(torch.complex128) - b.to(torch.complex128)).abs()
    else:
        distance = (a.to(torch.float64) - b.to(torch.float64)).abs()
    # Equal infinities with other bits do not exist; what is not a number here comes from one side alone, or from two unlike.
    return float(distance.nan_to_num(nan=math.inf, posinf=math.inf).max())


def _max_ulp(a: torch.Tensor, b: torch.Tensor) -> float:
    ordered = _ORDERED[a.element_size()]

    def place(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(ordered).to(torch.int64)
        lowest = torch.iinfo(ordered).min
        return torch.where(bits < 0, lowest - bits, bits).to(torch.float64)

    return float((place(a) - place(b)).abs().max())
