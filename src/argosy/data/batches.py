"""Batch: what a lane computes on.

Made by feeds (and by users who feed their own); named tensors are attributes. It knows its place (index, lane) and nothing of
ranks or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from argosy.errors import ConfigError

RESERVED = ("index", "lane", "rows", "tensors", "totals")


class Batch:
    """Named tensors, `batch.tokens` or `batch["tokens"]`, with the place they belong to."""

    __slots__ = ("index", "lane", "tensors", "totals")

    def __init__(self, tensors: Mapping[Any, Any], *, index: int = 0, lane: int = 0) -> None:
        for name in tensors:
            if not isinstance(name, str) or name in RESERVED or name.startswith("_"):
                raise ConfigError(
                    f"a batch cannot have a tensor named {name!r}",
                    fix=f"any name but {', '.join(RESERVED)}, without a leading underscore",
                )
        self.tensors = dict(tensors)
        self.index = index
        self.lane = lane
        self.totals: Any = None

    @property
    def rows(self) -> int:
        """How many samples."""
        for value in self.tensors.values():
            if isinstance(value, torch.Tensor) and value.dim():
                return int(value.shape[0])
        return 0

    def __getattr__(self, name: str) -> Any:
        # Underscored names are asked for by copy and pickle before there are any tensors.
        if not name.startswith("_") and name != "tensors" and name in self.tensors:
            return self.tensors[name]
        known = "" if name.startswith("_") or name == "tensors" else ", ".join(self.tensors)
        raise AttributeError(f"this batch has no {name!r}; it has: {known}")

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name}={tuple(value.shape)}" if isinstance(value, torch.Tensor) else name
            for name, value in self.tensors.items()
        )
        return f"Batch(index={self.index}, lane={self.lane}, {shapes})"
