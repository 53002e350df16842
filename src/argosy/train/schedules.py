"""Factors of the learning rate as pure functions of the step.

A schedule is called with the index of a step and returns the factor by which every group's own learning rate is multiplied. It has no state, so a resume, a rewind
or another world size changes nothing. Any function of the step can be given instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from argosy.errors import ConfigError

Schedule = Callable[[int], float]


def constant(*, warmup: int = 0) -> Schedule:
    """Up to 1 over `warmup` steps, then 1."""
    _check(warmup=warmup)
    return lambda step: _warm(step, warmup)


def cosine(steps: int, *, warmup: int = 0, least: float = 0.0) -> Schedule:
    """Up to 1 over `warmup` steps, then down to `least` along half a cosine until `steps`."""
    _check(steps=steps, warmup=warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return _warm(step, warmup)
        part = min(1.0, (step - warmup) / max(1, steps - warmup))
        return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * part))

    return factor


def trapezoid(steps: int, *, warmup: int = 0, cooldown: int = 0, least: float = 0.0) -> Schedule:
    """Up to 1, level, and down to `least` in a straight line over the last `cooldown` steps."""
    _check(steps=steps, warmup=warmup, cooldown=cooldown)
    if warmup + cooldown > steps:
        raise ConfigError(
            f"warmup {warmup} and cooldown {cooldown} do not fit into {steps} steps",
            fix="make them shorter",
        )

    def factor(step: int) -> float:
        if step < warmup:
            return _warm(step, warmup)
        left = steps - step
        if left >= cooldown:
            return 1.0
        return least + (1.0 - least) * max(0, left) / cooldown

    return factor


def _warm(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0 or (name == "steps" and value == 0):
            raise ConfigError(f"{name} = {value} in a schedule", fix="count steps from 1")
