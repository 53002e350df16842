"""Denominators of named loss terms over all lanes of a batch, known before the first backward pass.

`counts(batch)` is asked for every lane of the global batch, which each rank reads for itself: nobody waits for anybody. Without `counts` a lane's batch is just handed on. Called by parts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from argosy.data.prefetch import Ahead
from argosy.errors import ConfigError

Counts = Callable[[Any], Mapping[str, float]]


class Counted:
    """The batches of a trainer, with `batch.totals` filled in."""

    def __init__(self, ahead: Ahead, counts: Counts | None, num_lanes: int) -> None:
        self._ahead = ahead
        self._counts = counts
        self._num_lanes = num_lanes
        self._index = -1
        self._batches: dict[int, Any] = {}
        self._totals: dict[str, float] = {}

    @property
    def needs_all_lanes(self) -> bool:
        """Whether every rank reads the batches of all lanes."""
        return self._counts is not None

    def take(self, index: int, lane: int) -> Any:
        """A lane's batch, made ahead or at once."""
        if self._counts is None:
            return self._ahead.take(index, lane)
        if index != self._index:
            self._count(index, self._counts)
        batch = self._batches.pop(lane, None)
        if batch is None:
            batch = self._ahead.take(index, lane)
        batch.totals = dict(self._totals)
        return batch

    def _count(self, index: int, counts: Counts) -> None:
        self._batches = {lane: self._ahead.take(index, lane) for lane in range(self._num_lanes)}
        self._totals = totals_of(counts, self._batches.values())
        self._index = index


def totals_of(counts: Counts, batches: Iterable[Any]) -> dict[str, float]:
    """What `counts` gives for all lanes together, by name; `batches` are in the order of lanes."""
    totals: dict[str, float] = {}
    for batch in batches:
        for name, value in counts(batch).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    for name, total in totals.items():
        if not total >= 0:
            raise ConfigError(f"counts() gave {total} for {name!r}", fix="give what is counted")
        # Where no lane has any of it, its sum is zero, whatever it is divided by.
        totals[name] = total or 1.0
    return totals
