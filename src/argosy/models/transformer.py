"""`GPT`: a decoder-only transformer as a plain `nn.Module`, read from top to bottom in the order a token takes.

RMSNorm before each part, rotary positions, grouped-query attention, SwiGLU, no biases. The same forward trains, scores
and generates: a `KeyValueCache` only says where keys and values are kept. Weights are drawn from torch's default
generator alone, in the order of the modules, so a seed decides every bit. Never draws numbers in forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from argosy.errors import ConfigError
from argosy.models.keyvalues import KeyValueCache, LayerCache
from argosy.models.sizes import GPTConfig, num_config_parameters

Rotation = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """Token ids (rows, length) in, logits (rows, length, vocab_size) out."""

    __call__: Callable[..., Tensor]
    cosines: Tensor
    sines: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.should_recompute = config.should_recompute
        self.embedding = Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.norm_epsilon)
        self.head = None if config.is_tied else Linear(config.width, config.vocab_size)
        self._set_rotation()

    @classmethod
    def of_depth(
        cls, depth: int, vocab_size: int = 320, sequence_length: int = 256, **overrides: Any
    ) -> GPT:
        """A model from one dial; `overrides` are fields of `GPTConfig`."""
        return cls(GPTConfig.of_depth(depth, vocab_size, sequence_length, **overrides))

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Logits of the token after each position."""
        return self.logits(self.hidden(tokens, cache))

    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """States after the last norm: what `logits` and losses that never hold all logits start from."""
        length = tokens.shape[1]
        if length > self.cosines.shape[0]:
            raise ConfigError(
                f"{length} tokens exceed sequence_length = {self.cosines.shape[0]}",
                fix="cut the sequences, or build the model with a longer sequence_length",
            )
        start = 0 if cache is None else cache.extend(length)
        rotation = (self.cosines[start : start + length], self.sines[start : start + length])
        should_recompute = self.should_recompute and cache is None and torch.is_grad_enabled()
        x: Tensor = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if should_recompute:
                # Nothing in a block is random, so there is no generator state to keep for the second forward.
                x = checkpoint(
                    block, x, rotation, None, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block(x, rotation, None if cache is None else cache.layers[index])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the vocabulary for states that came from `hidden`."""
        return functional.linear(hidden, self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """(vocab_size, width): the output projection, whether it is the embedding or not."""
        return self.embedding.weight if self.head is None else self.head.weight

    def extra_repr(self) -> str:
        """What `print(model)` adds to its name."""
        return f"{num_config_parameters(self.config):,} parameters"

    def _set_rotation(self) -> None:
        cosines, sines = rotation_tables(self.config, self.embedding.weight.device)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPT:
        """Cast and move the weights; the rotation tables are made anew.

        In bfloat16 they would lose positions, and after `to_empty` they would be noise.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._set_rotation()
        return self


class Block(nn.Module):
    """Attention, then the feed-forward part, each added to the stream it read."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_norm = RMSNorm(config.width, config.norm_epsilon)
        self.feed = FeedForward(config)

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        """(rows, length, width) in and out."""
        x = x + self.attention(self.attention_norm(x), rotation, cache)
        return x + self.feed(self.feed_norm(x))


class Attention(nn.Module):
    """Causal attention in which a few key-value heads serve all query heads."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.num_turned = config.num_heads + config.num_kv_heads
        self.head_width = config.head_width
        self.has_qk_norm = config.has_qk_norm
        num_all_heads = config.num_heads + 2 * config.num_kv_heads
        self.project_in = Linear(config.width, num_all_heads * config.head_width)
        self.project_out = Linear(config.width, config.width, gain=residual_gain(config))

    def forward(self, x: Tensor, rotation: Rotation, cache: LayerCache | None) -> Tensor:
        """What each position gathers from those before it."""
        rows, length, width = x.shape
        heads = self.project_in(x).view(rows, length, -1, self.head_width)
        # Queries and keys are normed and rotated in one piece: half the calls.
        turned, values = heads.split_with_sizes([self.num_turned, self.num_kv_heads], 2)
        if self.has_qk_norm:
            turned = functional.rms_norm(turned, (self.head_width,))
        turned, values = rotate(turned, rotation).transpose(1, 2), values.transpose(1, 2)
        queries, keys = turned.split_with_sizes([self.num_heads, self.num_kv_heads], 1)
        if cache is None:
            mixed = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
        else:
            mixed = cache.attend(queries, keys, values)
        return self.project_out(mixed.transpose(1, 2).reshape(rows, length, width))


class FeedForward(nn.Module):
    """SwiGLU; gate and up are one matrix."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.width, 2 * config.hidden_width)
        self.down = Linear(config.hidden_width, config.width, gain=residual_gain(config))

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Linear(nn.Linear):
    """A projection without bias that starts with the variance of its input, times `gain` squared."""

    __call__: Callable[..., Tensor]

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        self.gain = gain  # before the constructor: it calls `reset_parameters`
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weights; also after `to_empty`."""
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)


class Embedding(nn.Embedding):
    """The rows of the vocabulary, small enough to be the output projection too."""

    def reset_parameters(self) -> None:
        """Draw the weights; also after `to_empty`."""
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class RMSNorm(nn.RMSNorm):
    """Scale to unit mean square, then by a learned weight."""

    __call__: Callable[..., Tensor]


def residual_gain(config: GPTConfig) -> float:
    """2 × num_layers parts are added to the stream; together they start as large as one."""
    return math.sqrt(0.5 / config.num_layers)


def rotation_tables(config: GPTConfig, device: torch.device) -> Rotation:
    """Cosines and signed sines, (sequence_length, 1, head_width), for `rotate`."""
    half = config.head_width // 2
    frequencies = config.rope_base ** (
        -torch.arange(half, dtype=torch.float64, device=device) / half
    )
    positions = torch.arange(config.sequence_length, dtype=torch.float64, device=device)
    angles = torch.outer(positions, frequencies)[:, None]
    sines = angles.sin()
    return angles.cos().repeat(1, 1, 2).float(), torch.cat((-sines, sines), -1).float()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn channel i against channel i + head_width / 2 by the angle of the position; (rows, length, heads, width)."""
    cosines, sines = rotation
    halves_swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cosines, halves_swapped, sines).to(x.dtype)
