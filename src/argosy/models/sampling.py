"""From logits to a token: temperature, top-k, top-p, and the uniform numbers that decide.

One number in [0, 1) per token, drawn beforehand from (seed, row), so a row's text depends on neither its neighbours
nor on how generation is carried out. Called by `generation.py`; never touches torch's default generator.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from argosy.errors import ConfigError


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a token is chosen; temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(f"temperature = {self.temperature}", fix="use 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k = {self.top_k}", fix="use 1 or more, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p}", fix="use a share above 0, at most 1")


def draw(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """One token for each row of `logits` (rows, vocabulary), by inverting the cumulative distribution."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scaled = logits.double() / sampling.temperature
    names = None
    if sampling.top_k is not None and sampling.top_k < scaled.shape[-1]:
        scaled, names = scaled.topk(sampling.top_k)
    elif sampling.top_p < 1:
        scaled, names = scaled.sort(dim=-1, descending=True, stable=True)
    shares = scaled.softmax(-1)
    summed = shares.cumsum(-1)
    if sampling.top_p < 1:
        # The likeliest tokens until their sum reaches top_p: the one that crosses it is among them.
        last = (summed - shares < sampling.top_p).sum(-1, keepdim=True) - 1
        total = summed.gather(-1, last)
    else:
        last = torch.tensor(scaled.shape[-1] - 1)
        total = summed[:, -1:]
    chosen = torch.searchsorted(summed, uniforms[:, None] * total, right=True)
    chosen = torch.minimum(chosen, last)  # a product may round up to the total itself
    return (chosen if names is None else names.gather(-1, chosen)).squeeze(-1)


def uniform_rows(seed: int, rows: int, count: int) -> Tensor:
    """(rows, count) numbers in [0, 1); row r depends on (seed, r) alone, and a larger count only adds to its end."""
    generator = torch.Generator()
    numbers = torch.empty(rows, count, dtype=torch.float64)
    for row in range(rows):
        # Odd factors spread neighbouring seeds and rows over all bits.
        mixed = (seed * 0x9E3779B97F4A7C15 + row * 0xBF58476D1CE4E5B9) % 2**63
        numbers[row].uniform_(generator=generator.manual_seed(mixed))
    return numbers
