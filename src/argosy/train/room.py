"""Refuses a model that does not fit into this host's memory, before anything is made: how much it needs, and what would fit.

What the run holds already counts as there: a rank that replaces another maps it and takes nothing more. Called by parts.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from argosy.errors import ArenaGone, NoRoom
from argosy.move import broker, hostmemory
from argosy.move.layout import Layout
from argosy.train.settings import Settings
from argosy.train.stateplan import StatePlan


def check(
    plan: StatePlan, layout: Layout, model: torch.nn.Module, settings: Settings, prefix: str
) -> None:
    """NoRoom when weights, versions and lane slots do not fit."""
    # Asked first: what others of this run take meanwhile is then counted as held.
    available = hostmemory.available_bytes() - hostmemory.MARGIN_BYTES
    count = sum(p.numel() for p in model.parameters())
    is_half = settings.precision == "bfloat16"
    weights = sum(p.numel() * (2 if is_half else p.element_size()) for p in model.parameters())
    # Two versions in turn; a snapshot to go back to is a third. Without recovery one is updated in place.
    num_versions = 3 if settings.guard.policy == "rewind" else 2 if settings.recovery else 1
    state, slots = num_versions * plan.num_bytes, layout.places.total
    needed = weights + state + slots
    if needed <= available:
        return
    names = [f"{prefix}.weights", f"{prefix}.exchange"]
    names += [f"{prefix}.state.{slot}" for slot in range(layout.num_versions)]
    held = _held_bytes(names)
    if needed - held <= available:
        return
    fits = int(count * max(0, available + held) / needed)
    raise NoRoom(
        f"training needs {_size(needed)} of shared memory (weights {_size(weights)}, "
        f"state {_size(state)}, gradients {_size(slots)}), {_size(max(0, available + held))} can be had",
        fix=f"about {_count(fits)} of {_count(count)} parameters would fit; fewer lanes need fewer slots for gradients",
    )


def _held_bytes(names: Iterable[str]) -> int:
    """Memory that the run's arenas have taken."""
    held = 0
    for name in names:
        try:
            grant = broker.open(name)
        except ArenaGone:
            continue
        held += os.fstat(grant.descriptor).st_blocks * 512
        broker.close(grant)
    return held


def _size(num_bytes: int) -> str:
    if num_bytes < 1 << 30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


def _count(number: int) -> str:
    return f"{number / 1e6:.2f} M" if number >= 10_000 else str(number)
