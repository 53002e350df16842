"""Weights are read-only outside a step: finds out when somebody has written to them all the same.

Several ranks that change one shared copy change it several times, and the next commit overwrites it: such a change is refused before it is computed with. In-place operations on a
parameter raise its counter of changes; what goes around that (`.data`) is found in a few elements of every parameter, read in one go. Called by transaction.py when weights are derived and when lanes begin.
"""

from __future__ import annotations

import torch

from argosy.errors import ConfigError
from argosy.train.memories import Weights

_SAMPLES = 8
"""Elements of each parameter."""
_FIX = "change weights inside `with trainer.edit() as params:`; masters are what a step starts from"


class Integrity:
    """The weights as they were last derived."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        names = list(weights.tensors)
        self._names = [name for name in names if weights.tensors[name].numel()]
        self._starts: list[int] = []
        places: list[int] = []
        for name in self._names:
            tensor, offset = weights.tensors[name], weights.offsets[name]
            size = tensor.element_size() // 2
            self._starts.append(len(places))
            last = tensor.numel() - 1
            for element in sorted({last * each // (_SAMPLES - 1) for each in range(_SAMPLES)}):
                places += [offset // 2 + element * size + half for half in range(size)]
        self._places = torch.tensor(places, dtype=torch.int64)
        self._sample: torch.Tensor | None = None
        self._counters: list[int] = []

    def note(self) -> None:
        """The weights are as they should be."""
        self._sample = self._weights.halves.index_select(0, self._places)
        self._counters = [p._version for p in self._weights.parameters.values()]

    def check(self) -> None:
        """ConfigError when they have been changed since."""
        if self._sample is None:
            return
        counters = [p._version for p in self._weights.parameters.values()]
        if counters != self._counters:
            pairs = zip(self._weights.parameters, counters, self._counters, strict=True)
            raise _changed(next(name for name, a, b in pairs if a != b))
        sample = self._weights.halves.index_select(0, self._places)
        if not torch.equal(sample, self._sample):
            first = int((sample != self._sample).nonzero()[0])
            raise _changed(self._names[sum(start <= first for start in self._starts) - 1])


def _changed(name: str) -> ConfigError:
    return ConfigError(f"parameter {name!r} was changed outside a step", fix=_FIX)
