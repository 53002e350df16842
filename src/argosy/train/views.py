"""`with trainer.weights("ema")`: the module shows the averages of the committed version instead of its weights.

Only in this process: the parameters are pointed to other memory and back. No pin is needed, since nothing is committed without this rank's lanes, which it cannot compute in here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from argosy.errors import ConfigError
from argosy.train.memories import Version, Weights
from argosy.train.stateplan import AVERAGE


@contextmanager
def shown(weights: Weights, version: Version, key: str) -> Iterator[None]:
    """Let the module's parameters be these fields of a version, for a while."""
    fields = {field.name for field in version.plan.fields if field.key == key}
    if key != AVERAGE or not fields:
        raise ConfigError(
            f"there are no weights {key!r}",
            fix='run.trainer(ema=0.999) keeps averages: weights("ema")',
        )
    names = [name for name in weights.parameters if name in fields]
    try:
        for name in names:
            _show(weights.parameters[name], version.tensor(name, key), weights.tensors[name])
        yield
    finally:
        for name in names:
            weights.parameters[name].data = weights.tensors[name]


def _show(parameter: torch.nn.Parameter, value: torch.Tensor, like: torch.Tensor) -> None:
    if value.dtype == like.dtype and value.stride() == like.stride():
        parameter.data = value
    else:
        parameter.data = torch.empty_like(like).copy_(value)
