"""The way of the state from one version to the next: sums of gradients, scaled, through the optimizer; buffers; the moving average.

Works on the parameters that this rank updates, from the old version into the new one. Used by transaction.py and replicated.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from argosy.errors import ConfigError
from argosy.move.gathered import values_of
from argosy.move.layout import Layout
from argosy.train.lanes import BUFFER
from argosy.train.memories import Version
from argosy.train.settings import Settings
from argosy.train.updates import Updater


class Advance:
    """Sums of gradients and what they do to the state."""

    def __init__(self, layout: Layout, updaters: list[Updater], settings: Settings) -> None:
        self._layout = layout
        self._updaters = updaters
        self._settings = settings
        self.gradients = torch.empty(layout.num_elements)
        """Where elements are added up over all lanes."""
        self._sums = {p.name: values_of(self.gradients, layout, p.name) for p in layout.parameters}
        buffers = [p.name for p in layout.parameters if p.name.startswith(BUFFER)]
        self._first_buffer_page = layout.pages_of(buffers[0])[0] if buffers else layout.num_pages

    def norms_of(self, pages: list[int], partials: list[float]) -> list[float]:
        """What pages add to the norm of the gradient: of a buffer nothing, unless it is not finite."""
        first = self._first_buffer_page
        return [p if page < first else p - p for page, p in zip(pages, partials, strict=True)]

    def write(
        self,
        part: int,
        versions: tuple[Version, Version],
        names: list[str],
        touched: Collection[str],
        scale: float,
        step: int,
    ) -> None:
        """Make these parameters of the second version from the first; untouched ones have no gradient."""
        old, new = versions
        gradients: dict[str, torch.Tensor | None] = {}
        found: list[torch.Tensor] = []
        for name in names:
            flat = self._sums[name]
            if name.startswith(BUFFER):
                _average(new, name, flat, self._layout.num_lanes)
            elif name in touched:
                gradients[name] = flat
                found.append(flat)
            else:
                gradients[name] = None
        if found:
            torch._foreach_mul_(found, scale)
        self._updaters[part].update(old, new, gradients, self._factor(step))
        if self._settings.ema is not None:
            for name in gradients:
                torch.lerp(
                    old.tensor(name, "ema"),
                    new.tensor(name),
                    1.0 - self._settings.ema,
                    out=new.tensor(name, "ema"),
                )

    def _factor(self, step: int) -> float:
        """Of the learning rates; one that is no number would make all parameters none, for good."""
        schedule = self._settings.schedule
        factor = 1.0 if schedule is None else float(schedule(step))
        if not math.isfinite(factor):
            raise ConfigError(
                f"the schedule gives {factor} for step {step}", fix="give a factor for every step"
            )
        return factor


def _average(new: Version, name: str, flat: torch.Tensor, num_lanes: int) -> None:
    """A buffer's next value: the mean over the lanes; of integers lane 0's."""
    target = new.tensor(name)
    value = flat.view(target.shape)
    target.copy_(value / num_lanes if target.is_floating_point() else value)
