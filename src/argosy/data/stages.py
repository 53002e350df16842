"""Stages: which source each sample of a mixture comes from, with O(1) seek.

Samples are cut into blocks of 2048. In every block of a stage each source has the same number of places (its quota); where they lie is
a shuffle of the block. So what a source has given before a sample is a multiplication and one block's count, however far the
run is. Pure: called by feeds.py, never touches data.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from argosy.data.order import Integers, derive_words, scramble
from argosy.errors import ConfigError

BLOCK = 2048
_PLACES = np.arange(BLOCK)
Weights: TypeAlias = Mapping[str, float]
Schedule: TypeAlias = Mapping[int, Weights]


class Stages:
    """The places of all sources, by sample number; `starts` are the batch indices at which `quotas` begin to hold."""

    def __init__(
        self,
        starts: Sequence[int],
        quotas: Sequence[Sequence[int]],
        *,
        batch_size: int,
        seed: int,
    ) -> None:
        self._starts = [start * batch_size for start in starts]
        self._quotas = [np.asarray(quota, dtype=np.int64) for quota in quotas]
        self._seed = seed
        self._table = lru_cache(maxsize=8)(self._make_table)
        self._given = self._count_before_stages()

    def assign(self, first: int, count: int) -> tuple[Integers, Integers]:
        """For samples first … first + count - 1: the source of each, and its ordinal in that source."""
        sources, ordinals = np.empty(count, np.int64), np.empty(count, np.int64)
        filled = 0
        while filled < count:
            stage, block, offset = self._locate(first + filled)
            room = min(count - filled, BLOCK - offset, self._end(stage) - first - filled)
            who, nth = (part[offset : offset + room] for part in self._table(stage, block))
            given = self._given[stage] + block * self._quotas[stage]
            sources[filled : filled + room] = who
            ordinals[filled : filled + room] = given[who] + nth
            filled += room
        return sources, ordinals

    def _locate(self, sample: int) -> tuple[int, int, int]:
        stage = bisect_right(self._starts, sample) - 1
        return (stage, *divmod(sample - self._starts[stage], BLOCK))

    def _end(self, stage: int) -> int:
        return self._starts[stage + 1] if stage + 1 < len(self._starts) else 1 << 63

    def _make_table(self, stage: int, block: int) -> tuple[Integers, Integers]:
        """Source of each place of a block, and how many places before it in the block have the same source."""
        quotas = self._quotas[stage]
        in_order = np.repeat(np.arange(len(quotas), dtype=np.int16), quotas)
        (key,) = derive_words(1, "mixture", self._seed, stage, block)
        # Scrambled numbers are all different, so there is one way to sort them.
        who = in_order[np.argsort(scramble(np.arange(BLOCK, dtype=np.uint64) + key))]
        nth = np.empty(BLOCK, np.int64)
        nth[np.argsort(who, kind="stable")] = _PLACES - np.repeat(
            np.cumsum(quotas) - quotas, quotas
        )
        return who.astype(np.int64), nth

    def _count_before_stages(self) -> list[Integers]:
        """What each source has given before each stage; a stage may end in the middle of a block."""
        given = [np.zeros_like(self._quotas[0])]
        for stage, end in enumerate(self._starts[1:]):
            block, offset = divmod(end - self._starts[stage], BLOCK)
            who, _ = self._table(stage, block)
            part = np.bincount(who[:offset], minlength=len(given[0]))
            given.append(given[-1] + block * self._quotas[stage] + part)
        return given


def read_schedule(weights: Any, names: Sequence[str]) -> dict[int, list[float]]:
    """Weights of all sources by the batch index from which they hold; refuses what makes no sense."""
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"weights = {weights!r} name no source", fix=_example(names))
    if not all(isinstance(value, Mapping) for value in weights.values()):
        return {0: _read_weights(weights, names, "weights")}
    for start in weights:
        if isinstance(start, bool) or not isinstance(start, int) or start < 0:
            raise ConfigError(
                f"weights has a stage that begins at step {start!r}",
                fix="keys of stages are whole numbers of at least 0: weights={0: {…}, 1000: {…}}",
            )
    if 0 not in weights:
        raise ConfigError(
            f"the first stage of weights begins at step {min(weights)}",
            fix="say which weights hold from step 0 on",
        )
    return {
        start: _read_weights(weights[start], names, f"weights[{start}]")
        for start in sorted(weights)
    }


def _read_weights(weights: Mapping[Any, Any], names: Sequence[str], where: str) -> list[float]:
    unknown = [name for name in weights if name not in names]
    if unknown:
        raise ConfigError(
            f"{where} names {unknown[0]!r}, which is no source of this mixture",
            fix=f"sources: {', '.join(names)}",
        )
    values = [weights.get(name, 0) for name in names]
    for name, value in zip(names, values, strict=True):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise ConfigError(
                f"{where}[{name!r}] = {value!r} is not a number of at least 0", fix=_example(names)
            )
    if not any(values):
        raise ConfigError(f"{where} are all zero", fix=_example(names))
    return [float(value) for value in values]


def apportion(weights: Sequence[float], places: int = BLOCK) -> list[int]:
    """Whole numbers that add up to `places`, nearest to the weights; a source with any weight has at least one."""
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) * places / total for weight in weights]
    quotas = [max(int(share), 1) if share else 0 for share in exact]
    if sum(1 for quota in quotas if quota) > places:
        raise ConfigError(
            f"a mixture of {len(weights)} sources", fix=f"at most {places} have a weight above 0"
        )
    by_remainder = sorted(range(len(exact)), key=lambda i: (quotas[i] - exact[i], i))
    for chosen in by_remainder[: max(places - sum(quotas), 0)]:
        quotas[chosen] += 1
    while sum(quotas) > places:
        # Sources of almost no weight were rounded up to one place: the largest make room.
        quotas[quotas.index(max(quotas))] -= 1
    return quotas


def _example(names: Sequence[str]) -> str:
    inner = ", ".join(f'"{name}": 1' for name in list(names)[:2])
    return f"example: weights={{{inner}}}"
