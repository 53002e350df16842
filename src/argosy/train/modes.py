"""Training and evaluation mode of a module's parts: each as user code has left it.

A part that is kept in evaluation mode (batch statistics that are not to change, a frozen trunk without dropout) stays in it through lanes, evaluations and fed batches, and on every rank: one that has put its module
into evaluation mode as a whole, to draw a sample for one, trains on with the modes of before. Used by lanes.py and wherever user code runs with the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def begin_training(model: torch.nn.Module) -> None:
    """Put a module that is in evaluation mode as a whole, as pretrained ones come, into training mode; else its parts stay as they are."""
    if not model.training:
        model.train()


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """All parts in evaluation mode; each as it was afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in before:
            module.training = is_training


class Modes:
    """What a model trains in."""

    def __init__(self, model: torch.nn.Module) -> None:
        begin_training(model)
        self._model = model
        self._modules = tuple(model.modules())
        self._known = [module.training for module in self._modules]

    def resume(self) -> None:
        """Training goes on: with the present modes, or if the whole is in evaluation mode, with those of before."""
        if self._model.training:
            self._known = [module.training for module in self._modules]
            return
        for module, is_training in zip(self._modules, self._known, strict=True):
            module.training = is_training
