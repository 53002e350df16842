"""Mixture: several sources by weight, in stages if wanted.

`Mixture({"code": Tokens("code.bin"), "text": Tokens("text.bin")}, weights={"code": 3, "text": 1}, sequence_length=256)`; weights may change
by step: `{0: {…}, 1000: {…}}`. Each source is read in its own shuffled order, nothing twice before everything once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from argosy.data.datasets import DatasetSource, as_source
from argosy.data.feeds import Feed, Source, check_enough, check_sizes
from argosy.data.stages import Schedule, Stages, Weights, apportion, read_schedule
from argosy.data.tokens import Packing, Tokens, tokenizer_of
from argosy.errors import ConfigError, DataError


class Mixture:
    """Sources by name; without weights each counts by its number of samples."""

    def __init__(
        self,
        sources: Mapping[str, Any],
        *,
        weights: Weights | Schedule | None = None,
        sequence_length: int | None = None,
        packing: Packing | None = None,
    ) -> None:
        given: Any = sources
        if not isinstance(given, Mapping) or not given:
            raise ConfigError(
                "a mixture needs sources by name", fix='Mixture({"code": Tokens("code.bin")})'
            )
        self.sources: dict[str, Source] = {
            str(name): _prepare(name, source, sequence_length, packing)
            for name, source in given.items()
        }
        self._check_alike()
        if weights is None:
            weights = {name: source.num_samples for name, source in self.sources.items()}
        schedule = read_schedule(weights, list(self.sources))
        self._quotas = {start: apportion(values) for start, values in schedule.items()}
        self.sequence_length, self.packing = sequence_length, packing

    def feed(self, batch_size: int, lanes: int = 1, seed: int = 0) -> Feed:
        """Batches without end; a source that is used up begins its next epoch, in another order."""
        check_sizes(batch_size, lanes, seed)
        total = sum(source.num_samples for source in self.sources.values())
        check_enough(total, batch_size, "the mixture")
        starts, quotas = list(self._quotas), list(self._quotas.values())
        settings: dict[str, Any] = {
            "kind": "mixture",
            "weights": {str(start): quota for start, quota in self._quotas.items()},
        }
        first = next(iter(self.sources.values()))
        if isinstance(first, Tokens):
            settings.update(first.shape())
        stages = Stages(starts, quotas, batch_size=batch_size, seed=seed)
        return Feed(self.sources, stages, settings, batch_size=batch_size, lanes=lanes, seed=seed)

    @property
    def vocabulary_size(self) -> int | None:
        """Of the token files; None when no sidecar says it."""
        sizes = [s.vocabulary_size for s in self.sources.values() if isinstance(s, Tokens)]
        return next((size for size in sizes if size is not None), None)

    def _check_alike(self) -> None:
        kinds = {type(source).__name__ for source in self.sources.values()}
        if len(kinds) > 1:
            raise ConfigError(
                "a mixture of token files and other data sets",
                fix="samples of one mixture are put into one batch: make all sources of one kind",
            )
        packed: dict[tuple[str, int], str] = {}
        for name, source in self.sources.items():
            files = source.files if isinstance(source, Tokens) else []
            for file in files:
                if file.sidecar:
                    packed.setdefault(tokenizer_of(file), name)
            if len(packed) > 1:
                raise DataError(
                    f"{' and '.join(packed.values())} were packed with different tokenizers",
                    fix="pack them with the same tokenizer",
                )


def _prepare(name: object, source: Any, length: int | None, packing: Packing | None) -> Source:
    if isinstance(source, Mixture):
        raise ConfigError(f"source {name!r} is a mixture", fix="put its sources here, by weight")
    ready: Source = as_source(source)
    if isinstance(ready, Tokens):
        length = length or ready.sequence_length
        if length is None:
            raise ConfigError(
                f"the mixture has no sequence_length, which source {name!r} needs",
                fix="Mixture({…}, sequence_length=256)",
            )
        ready = ready.cut(length, packing)
    if ready.num_samples < 1:
        what = ready.label if isinstance(ready, Tokens | DatasetSource) else str(name)
        raise ConfigError(
            f"source {name!r} ({what}) has not one sample",
            fix="use more data, or a shorter sequence_length",
        )
    return ready
