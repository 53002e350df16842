"""Data sets: any map-style torch `Dataset` (or anything with `len` and `[]`) as a source.

`as_source(dataset)` numbers its samples; order, lanes and mixtures work as for token files. Before each sample the default generators of torch,
numpy and `random` are seeded from (seed, sample, epoch), and put back afterwards: random augmentation is the same in any process and
leaves no trace.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from argosy.data.feeds import Feed, check_enough, check_sizes
from argosy.data.order import derive_seed
from argosy.errors import ConfigError

_PROBES = 8


class DatasetSource:
    """A map-style data set; `names` are those of tuples, `collate` is torch's unless given."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        names: Sequence[str] | None = None,
        is_random: bool = True,
    ) -> None:
        self.dataset = dataset
        self.label = f"dataset {type(dataset).__name__}"
        self.num_samples = len(dataset)
        self.has_generators = is_random
        self._collate = collate or default_collate
        self._names = tuple(names) if names is not None else None
        self.fingerprint = self._fingerprint() if self.num_samples else "empty"

    def feed(self, batch_size: int, lanes: int = 1, seed: int = 0) -> Feed:
        """Batches of this data set, shuffled anew in every epoch."""
        check_sizes(batch_size, lanes, seed)
        check_enough(self.num_samples, batch_size, self.label)
        settings = {"kind": "dataset"}
        return Feed({"": self}, None, settings, batch_size=batch_size, lanes=lanes, seed=seed)

    def sample(self, number: int, *, seed: int, epoch: int) -> Any:
        """`dataset[number]` under generators that know only (seed, number, epoch)."""
        if not self.has_generators:
            return self.dataset[number]
        with generators_seeded(derive_seed("sample", seed, number, epoch)):
            return self.dataset[number]

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """One batch; a tensor is called `inputs`, a pair `inputs` and `labels`."""
        collated = self._collate(list(samples))
        if isinstance(collated, Mapping):
            return {str(name): value for name, value in collated.items()}
        if hasattr(collated, "_asdict"):
            return dict(collated._asdict())
        parts = list(collated) if isinstance(collated, list | tuple) else [collated]
        names = self._names or ("inputs", "labels")[: len(parts)]
        if len(names) != len(parts):
            raise ConfigError(
                f"{self.label} gives {len(parts)} values per sample, and {len(names)} names are known",
                fix='name them: as_source(dataset, names=("image", "mask", "label"))',
            )
        return dict(zip(names, parts, strict=True))

    def describe(self) -> dict[str, Any]:
        """Small, JSON."""
        return {
            "dataset": type(self.dataset).__qualname__[:64],
            "samples": self.num_samples,
            "fingerprint": self.fingerprint,
        }

    def check_unchanged(self, numbers: Sequence[int]) -> None:
        """What lies behind a data set is its own affair."""

    def _fingerprint(self) -> str:
        """Its own, if it has one (`_fingerprint` of Hugging Face data sets); else of its size and eight of its samples."""
        kind = type(self.dataset)
        digest = hashlib.sha256(
            f"{kind.__module__}.{kind.__qualname__}:{self.num_samples}".encode()
        )
        own = getattr(self.dataset, "fingerprint", None) or getattr(
            self.dataset, "_fingerprint", None
        )
        if isinstance(own, str):
            digest.update(own.encode())
            return digest.hexdigest()
        last = self.num_samples - 1
        for number in sorted({last * probe // (_PROBES - 1) for probe in range(_PROBES)}):
            with generators_seeded(number):
                _digest_value(digest, self.dataset[number])
        return digest.hexdigest()


def as_source(
    dataset: Any,
    collate: Callable[[list[Any]], Any] | None = None,
    *,
    names: Sequence[str] | None = None,
    is_random: bool = True,
) -> Any:
    """A map-style data set as a source of batches; sources are returned as they are."""
    if _is_source(dataset):
        return dataset
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"{type(dataset).__name__} can only be iterated, so a batch cannot be computed again",
            fix="use a map-style Dataset (__len__ and __getitem__), or pack it: `argosy data pack`",
        )
    is_other = isinstance(dataset, str | bytes | os.PathLike | Mapping)
    if is_other or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} is no data set",
            fix='give Tokens("code.bin"), a Mixture({…}), or an object with __len__ and __getitem__',
        )
    return DatasetSource(dataset, collate, names=names, is_random=is_random)


def _is_source(candidate: Any) -> bool:
    return callable(getattr(candidate, "feed", None)) and not isinstance(candidate, type)


@contextlib.contextmanager
def generators_seeded(seed: int) -> Iterator[None]:
    """Default generators of torch, numpy and `random` seeded inside, as before outside."""
    generator = torch.default_generator
    before = generator.get_state(), np.random.get_state(), random.getstate()
    try:
        generator.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        yield
    finally:
        generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _digest_value(digest: Any, value: Any) -> None:
    """Bytes of tensors, arrays, numbers and text, through containers; of anything else the type alone."""
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, str | bytes | int | float | bool | np.generic):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key in value:
            _digest_value(digest, key)
            _digest_value(digest, value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            _digest_value(digest, part)
