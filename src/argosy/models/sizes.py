"""What a GPT is made of, before a tensor exists: its configuration, named sizes, and counts that follow from them.

`GPTConfig.of_depth` is the one dial: depth decides width, heads and hidden width. Called by `transformer.py`, by
memory estimates and by anything that reports FLOPs; never imports torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.config.nearest import did_you_mean
from argosy.errors import ConfigError

WIDTH_PER_LAYER = 64
HEAD_WIDTH = 64
HIDDEN_MULTIPLE = 64


class GPTConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every choice that shapes a `GPT`; equal configs and equal seeds give equal bits."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    hidden_width: int
    vocab_size: int = 320  # bytes, the end of a document, and a multiple of 64
    sequence_length: int = 256
    is_tied: bool = True  # the embedding is also the output projection
    has_qk_norm: bool = False
    should_recompute: bool = False  # activation checkpointing: less memory, a second forward
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    @classmethod
    def of_depth(
        cls, depth: int, vocab_size: int = 320, sequence_length: int = 256, **overrides: Any
    ) -> GPTConfig:
        """The config of `depth` layers: 64 channels of width per layer, heads of 64, the rest from those."""
        unknown = overrides.keys() - set(cls.__struct_fields__)
        if unknown:
            name = min(unknown)
            raise ConfigError(
                f"GPTConfig has no field {name!r}", fix=did_you_mean(name, cls.__struct_fields__)
            )
        width = overrides.get("width", WIDTH_PER_LAYER * depth)
        num_heads = overrides.get("num_heads", max(1, width // HEAD_WIDTH))
        derived = {
            "num_layers": depth,
            "width": width,
            "num_heads": num_heads,
            "num_kv_heads": _largest_proper_divisor(num_heads),
            "hidden_width": -(-8 * width // 3 // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE,
            "vocab_size": vocab_size,
            "sequence_length": sequence_length,
        }
        return cls(**(derived | overrides))

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} = {value!r}", fix="give a whole number, at least 1")
        if self.width % self.num_heads or self.head_width % 2:
            raise ConfigError(
                f"width = {self.width} does not give {self.num_heads} heads of an even width",
                fix=f"make width a multiple of {2 * self.num_heads}",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads = {self.num_heads} is not divisible by num_kv_heads = {self.num_kv_heads}",
                fix=f"use num_kv_heads = {_largest_proper_divisor(self.num_heads)}",
            )

    @property
    def head_width(self) -> int:
        """Channels of one attention head."""
        return self.width // self.num_heads


def num_matrix_parameters(config: GPTConfig) -> int:
    """Parameters that multiply activations for every token: all but the norms and the embedding's look-up."""
    attention_width = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_width
    block = config.width * (attention_width + 3 * config.hidden_width)
    return config.num_layers * block + config.vocab_size * config.width


def num_config_parameters(config: GPTConfig) -> int:
    """All parameters of a `GPT` of this config, a tied embedding counted once."""
    norms = (2 * config.num_layers + 1) * config.width
    lookup = 0 if config.is_tied else config.vocab_size * config.width
    return num_matrix_parameters(config) + norms + lookup


def flops_per_token(config: GPTConfig, *, is_training: bool = True) -> int:
    """Useful FLOPs for one token of a full sequence, matrix products alone.

    A multiply-add is two; causal attention counts the half that is not masked; backward is twice the forward;
    recomputed activations are not useful and not counted.
    """
    attended = (config.sequence_length + 1) / 2
    attention = 4 * config.num_layers * config.width * attended
    forward = 2 * num_matrix_parameters(config) + attention
    return round(3 * forward if is_training else forward)


def _largest_proper_divisor(number: int) -> int:
    return next((d for d in range(number // 2, 0, -1) if number % d == 0), 1)


_COUNTS = (
    "num_layers",
    "width",
    "num_heads",
    "num_kv_heads",
    "hidden_width",
    "vocab_size",
    "sequence_length",
)

# Sizes that tests and benchmarks name. XS is bound by the cost of calls, S by arithmetic.
XS = GPTConfig.of_depth(2, width=96, num_heads=3)  # 0.23 M parameters
S = GPTConfig.of_depth(6)  # 9.9 M parameters
