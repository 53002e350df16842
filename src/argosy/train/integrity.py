"""Weights are read-only outside a step: finds out when somebody has written to them all the same, or has put others in their place.

Several ranks that change one shared copy change it several times, and the next commit overwrites it: such a change is refused before it is computed with. In-place operations on a
parameter raise its counter of changes; what goes around that (`.data`) is found in a few elements of every parameter, read in one go. A module whose parameters lie elsewhere, or are other ones, would learn
nothing. Called by transaction.py when weights are derived and when lanes begin, and by lanes.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from argosy.errors import ConfigError
from argosy.train.memories import Region, Weights

_SAMPLES = 8
"""Elements of each parameter."""
_FIX = "change weights inside `with trainer.edit() as params:`; masters are what a step starts from"


class Integrity:
    """The weights as they were last derived."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._samples = [_Sample(region, weights.tensors) for region in weights.regions]
        self._counters: list[int] | None = None

    def note(self) -> None:
        """The weights are as they should be."""
        for sample in self._samples:
            sample.note()
        self._counters = [p._version for p in self._weights.parameters.values()]

    def check(self) -> None:
        """ConfigError when they have been changed since, or moved."""
        self._weights.check()
        if self._counters is None:
            return
        counters = [p._version for p in self._weights.parameters.values()]
        if counters != self._counters:
            pairs = zip(self._weights.parameters, counters, self._counters, strict=True)
            raise _changed(next(name for name, a, b in pairs if a != b))
        for each in self._samples:
            name = each.find_change()
            if name is not None:
                raise _changed(name)


class Places:
    """Where a module has the parameters that are trained: with `load_state_dict(assign=True)`, say, it would have others there."""

    def __init__(self, model: torch.nn.Module, trained: Mapping[str, torch.nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in trained.items()}
        self._places = [
            (module._parameters, key, parameter, names[id(parameter)])
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in names
        ]

    def check(self) -> None:
        """ConfigError when another parameter has taken one's place."""
        for holder, key, parameter, name in self._places:
            if holder.get(key) is not parameter:
                raise ConfigError(
                    f"the model has another parameter {name!r} than when the trainer was made",
                    fix="build, load and cast the model before run.trainer(); later change values in `with trainer.edit()`",
                )


class _Sample:
    """A few elements of every parameter that lies in one region."""

    def __init__(self, region: Region, tensors: Mapping[str, torch.Tensor]) -> None:
        self._halves = region.halves
        self._names = [name for name in region.offsets if tensors[name].numel()]
        self._starts: list[int] = []
        places: list[int] = []
        for name in self._names:
            tensor, offset = tensors[name], region.offsets[name]
            size = tensor.element_size() // 2
            self._starts.append(len(places))
            last = tensor.numel() - 1
            for element in sorted({last * each // (_SAMPLES - 1) for each in range(_SAMPLES)}):
                places += [offset // 2 + element * size + half for half in range(size)]
        self._places = torch.tensor(places, dtype=torch.int64)
        self._known = self._read()

    def note(self) -> None:
        """They are as they should be."""
        self._known = self._read()

    def find_change(self) -> str | None:
        """The first parameter that has changed since."""
        now = self._read()
        if torch.equal(now, self._known):
            return None
        first = int((now != self._known).nonzero()[0])
        return self._names[sum(start <= first for start in self._starts) - 1]

    def _read(self) -> torch.Tensor:
        return self._halves.index_select(0, self._places)


def _changed(name: str) -> ConfigError:
    return ConfigError(f"parameter {name!r} was changed outside a step", fix=_FIX)
