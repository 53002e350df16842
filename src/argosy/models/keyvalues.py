"""Keys and values that attention has already computed: where they are kept and how a new token reads them.

Made by `generation.py` once per call, with all its memory; `GPT` extends it by the length of each forward. Rows all
stand at the same position. It never computes a projection.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from argosy.errors import ConfigError
from argosy.models.sizes import GPTConfig


class KeyValueCache:
    """Preallocated keys and values of all layers, filled from the left."""

    def __init__(self, config: GPTConfig, rows: int, capacity: int, like: Tensor) -> None:
        """Room for `capacity` positions of `rows` sequences, on the device and in the dtype of `like`."""
        if capacity > config.sequence_length:
            raise ConfigError(
                f"{capacity} positions do not fit in sequence_length = {config.sequence_length}",
                fix="generate fewer tokens, or build the model with a longer sequence_length",
            )
        self.capacity = capacity
        self.length = 0
        shape = (config.num_layers, 2, rows, config.num_kv_heads, capacity, config.head_width)
        memory = like.new_empty(shape)
        self.layers = [LayerCache(keys, values) for keys, values in memory]

    def extend(self, length: int) -> int:
        """Make `length` more positions current in every layer; returns the first of them."""
        start, stop = self.length, self.length + length
        if stop > self.capacity:
            raise ConfigError(
                f"position {stop - 1} is beyond the {self.capacity} of the key-value cache",
                fix="make the cache with more capacity",
            )
        for layer in self.layers:
            layer.start, layer.stop = start, stop
        self.length = stop
        return start


class LayerCache:
    """Keys and values of one layer, (rows, kv heads, capacity, head width) each."""

    __slots__ = ("keys", "start", "stop", "values")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.start = self.stop = 0

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Keep the new keys and values, then attend from the new positions to all up to them."""
        self.keys[:, :, self.start : self.stop] = keys
        self.values[:, :, self.start : self.stop] = values
        kept_keys, kept_values = self.keys[:, :, : self.stop], self.values[:, :, : self.stop]
        if self.stop - self.start == 1:
            return _attend_from_one(queries, kept_keys, kept_values)
        mask = _seen(self.start, self.stop, queries.device) if self.start else None
        return functional.scaled_dot_product_attention(
            queries, kept_keys, kept_values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )


def _attend_from_one(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One position sees all: the query heads of a key-value head stand as its positions, so keys are read once."""
    rows, heads, _, width = queries.shape
    grouped = queries.reshape(rows, keys.shape[1], -1, width)
    return functional.scaled_dot_product_attention(grouped, keys, values).reshape(
        rows, heads, 1, width
    )


def _seen(start: int, stop: int, device: torch.device) -> Tensor:
    """(new, all): which positions a new one may see."""
    positions = torch.arange(stop, device=device)
    return positions <= positions[start:, None]
