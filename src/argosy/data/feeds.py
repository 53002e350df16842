"""Feed: batches as a pure function of (index, lane), from one source or a mixture.

Made by `.feed(batch_size, lanes, seed)` of the sources; called by the trainer and by prefetch. It keeps no position: seeking is asking for another
index, and everything a run must remember of its data is what `describe()` says. Ranks are unknown here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import numpy as np

from argosy.data.batches import Batch
from argosy.data.order import ORDER_VERSION, Integers, Permutation
from argosy.data.stages import Stages
from argosy.errors import ConfigError

STATE_BYTES = 4096
"""`describe()` is never longer than this as JSON."""
_WHOLE_BATCH = 1024
"""Up to this batch size the order of all lanes is found in one go and kept for the lanes that follow."""
_DRAWN_SAMPLES = 256
"""Of smaller batches several in one go, up to so many samples."""
_UNNAMED = ("fingerprint", "sources", "num_sources")
_SHOWN = 80
"""Characters of a value that a person is shown."""


class Source(Protocol):
    """Numbered samples; what Tokens and data sets offer to a feed."""

    num_samples: int
    has_generators: bool

    @property
    def fingerprint(self) -> str:
        """Of the bytes of all samples, as far as they can be known."""

    def sample(self, number: int, *, seed: int, epoch: int) -> Any:
        """One sample; the same for the same arguments."""

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Samples as named tensors with a leading dimension of rows."""

    def describe(self) -> dict[str, Any]:
        """Small, JSON."""

    def check_unchanged(self, numbers: Sequence[int]) -> None:
        """Refuse when what these samples are read from has changed since it was opened."""


class Feed:
    """`feed.batch(index, lane)`: the same bytes in any process, at any time, in any order of asking."""

    def __init__(
        self,
        sources: dict[str, Source],
        stages: Stages | None,
        settings: dict[str, Any],
        *,
        batch_size: int,
        lanes: int,
        seed: int,
    ) -> None:
        self.batch_size, self.lanes, self.seed = batch_size, lanes, seed
        self.rows = batch_size // lanes
        self._names = list(sources)
        self._sources = list(sources.values())
        self._stages = stages
        self._settings = {
            "order": ORDER_VERSION,
            **settings,
            "batch_size": batch_size,
            "lanes": lanes,
            "seed": seed,
        }
        self._drawn = max(1, _DRAWN_SAMPLES // batch_size) * batch_size
        self._draw = lru_cache(maxsize=4)(self._find_samples)
        self._permutation = lru_cache(maxsize=64)(self._make_permutation)

    def batch(self, index: int, lane: int) -> Batch:
        """Lane `lane` of batch `index`."""
        if index < 0 or not 0 <= lane < self.lanes:
            raise ConfigError(
                f"batch {index}, lane {lane}", fix=f"index ≥ 0 and lane in 0 … {self.lanes - 1}"
            )
        first = index * self.batch_size + lane * self.rows
        if self.batch_size <= _WHOLE_BATCH:
            drawn = self._draw(first // self._drawn * self._drawn, self._drawn)
            start = first % self._drawn
            places = [part[start : start + self.rows].tolist() for part in drawn]
        else:
            places = [part.tolist() for part in self._draw(first, self.rows)]
        return Batch(self._read(*places), index=index, lane=lane)

    @property
    def num_batches(self) -> int | None:
        """Whole batches in one pass over a single source; None for a mixture, which has no end."""
        if self._stages is not None:
            return None
        return self._sources[0].num_samples // self.batch_size

    def rest(self, lane: int) -> Batch | None:
        """A lane's share of what one pass over a single source has beyond its whole batches; lanes are filled in order, None is an empty one."""
        if self._stages is not None:
            return None
        count = self._sources[0].num_samples
        whole = count // self.batch_size
        first = whole * self.batch_size + lane * self.rows
        if first >= count:
            return None
        places = [
            part.tolist() for part in self._find_samples(first, min(self.rows, count - first))
        ]
        return Batch(self._read(*places), index=whole, lane=lane)

    def __len__(self) -> int:
        if (count := self.num_batches) is None:
            raise TypeError("a mixture has no length: its feed is without end")
        return count

    def __bool__(self) -> bool:
        return True

    @property
    def has_generators(self) -> bool:
        """Whether samples draw from the process's random generators, so that only one thread may compute at a time."""
        return any(source.has_generators for source in self._sources)

    @property
    def fingerprint(self) -> str:
        """Of the bytes and of all settings that decide a batch."""
        facts = [
            self._settings,
            [(n, s.fingerprint) for n, s in zip(self._names, self._sources, strict=True)],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """What stands in the run's record; the position is not in it, since that is the step number."""
        sources = [
            {"name": name[:64], **source.describe()}
            for name, source in zip(self._names, self._sources, strict=True)
        ]
        whole = {"fingerprint": self.fingerprint, **self._settings, "num_sources": len(sources)}
        if "weights" in whole and _num_bytes(whole) > STATE_BYTES // 2:
            # Many stages of many sources: the fingerprint above still holds all of it.
            whole["weights"] = f"{len(self._settings['weights'])} stages"
        while sources and _num_bytes({**whole, "sources": sources}) > STATE_BYTES:
            sources.pop()
        return {**whole, "sources": sources}

    def _find_samples(self, first: int, count: int) -> tuple[Integers, Integers, Integers]:
        """Source, number in the source, and epoch of `count` consecutive samples of the run."""
        if self._stages is None:
            sources, ordinals = np.zeros(count, np.int64), np.arange(first, first + count)
        else:
            sources, ordinals = self._stages.assign(first, count)
        numbers, epochs = np.empty(count, np.int64), np.empty(count, np.int64)
        for place in np.unique(sources).tolist():
            mine = np.flatnonzero(sources == place)
            epochs[mine], positions = np.divmod(ordinals[mine], self._sources[place].num_samples)
            for epoch in np.unique(epochs[mine]).tolist():
                at = epochs[mine] == epoch
                numbers[mine[at]] = self._permutation(place, epoch)(positions[at])
        return sources, numbers, epochs

    def _make_permutation(self, place: int, epoch: int) -> Permutation:
        size = self._sources[place].num_samples
        return Permutation(size, "source", self._names[place], self.seed, epoch)

    def _read(self, sources: list[int], numbers: list[int], epochs: list[int]) -> dict[str, Any]:
        if len(self._sources) == 1:
            self._sources[0].check_unchanged(numbers)
        else:
            for place in set(sources):
                pairs = zip(numbers, sources, strict=True)
                mine = [number for number, source in pairs if source == place]
                self._sources[place].check_unchanged(mine)
        samples = [
            self._sources[source].sample(number, seed=self.seed, epoch=epoch)
            for source, number, epoch in zip(sources, numbers, epochs, strict=True)
        ]
        return self._sources[0].collate(samples)


def check_sizes(batch_size: int, lanes: int, seed: int) -> None:
    """Refuse batches that cannot be cut into lanes."""
    for name, value in (("batch_size", batch_size), ("lanes", lanes), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{name} = {value!r} is not a whole number", fix=f"example: {name}=8")
    if batch_size < 1 or lanes < 1:
        raise ConfigError(f"batch_size = {batch_size}, lanes = {lanes}", fix="both are at least 1")
    if batch_size % lanes:
        below, above = batch_size // lanes * lanes, -(-batch_size // lanes) * lanes
        raise ConfigError(
            f"batch_size = {batch_size} is not divisible by lanes = {lanes}",
            fix=f"use {below} or {above}" if below else f"use {above}, or fewer lanes",
        )


def check_enough(num_samples: int, batch_size: int, what: str) -> None:
    """Refuse data that does not fill one batch."""
    if num_samples < batch_size:
        shorter = "" if "dataset" in what else ", or a shorter sequence_length"
        raise ConfigError(
            f"{what} has {num_samples} samples, fewer than one batch of {batch_size}",
            fix=f"use more data, batch_size ≤ {num_samples}{shorter}",
        )


def _num_bytes(facts: dict[str, Any]) -> int:
    return len(json.dumps(facts, ensure_ascii=False).encode())


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that decides batches, as it was and as it is."""

    name: str
    before: str
    after: str


def find_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """What differs between two descriptions of feeds, for people; an empty one differs in nothing that could be named."""
    if not before or not after:
        return []
    keys = [key for key in {**before, **after} if key not in _UNNAMED]
    if before.get("kind") != after.get("kind"):
        keys = ["kind", *(key for key in keys if key in before and key in after and key != "kind")]
    found = [
        (key, _shortened(before.get(key)), _shortened(after.get(key)))
        for key in keys
        if before.get(key) != after.get(key)
    ]
    old, new = ({each["name"]: each for each in one.get("sources", [])} for one in (before, after))
    # Of many sources the last ones are not described; only where both are can they be compared.
    is_whole = all(len(one.get("sources", [])) == one.get("num_sources") for one in (before, after))
    for name in {**old, **new} if is_whole else filter(new.__contains__, old):
        one, other = old.get(name, {}), new.get(name, {})
        if one.get("fingerprint") != other.get("fingerprint"):
            label = f"source {name!r}" if name else "data"
            found.append((label, _call(one), _call(other)))
    return [Difference(name=name, before=a, after=b) for name, a, b in found]


def _call(source: Mapping[str, Any]) -> str:
    """A source of a description, in a few words that another one does not have."""
    if not source:
        return "none"
    files = source.get("files") or []
    more = source.get("num_files", 1) - 1
    what = source.get("dataset") or (files[0] if files else "data")
    what += f" and {more} more" if more else ""
    size = f"{source['tokens']} tokens" if "tokens" in source else f"{source['samples']} samples"
    return f"{what} of {size}, fingerprint {source['fingerprint'][:12]}"


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
