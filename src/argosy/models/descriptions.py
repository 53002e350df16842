"""What a person asks about a model first: how many parameters, what shape, how much work per token.

Works for every `nn.Module`; a `GPT` tells more. Called by user code and reports; changes nothing.
"""

from __future__ import annotations

from torch import nn

from argosy.models.sizes import GPTConfig, flops_per_token, num_config_parameters


def num_parameters(model: nn.Module | GPTConfig, *, is_trainable: bool = False) -> int:
    """Elements of all parameters, shared ones once; with `is_trainable` only those that get gradients."""
    if isinstance(model, GPTConfig):
        return num_config_parameters(model)
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not is_trainable)


def describe(model: nn.Module) -> str:
    """A few lines for a log: class, parameters, dtype, and for a `GPT` its shape and FLOPs."""
    total, trained = num_parameters(model), num_parameters(model, is_trainable=True)
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    first = f"{type(model).__name__}: {_scaled(total)} parameters, {' and '.join(kinds) or 'none'}"
    lines = [first if trained == total else f"{first}, {_scaled(trained)} of them trained"]
    config = getattr(model, "config", None)
    if isinstance(config, GPTConfig):
        output = "tied to the embedding" if config.is_tied else "its own"
        lines += [
            f"  {config.num_layers} layers of width {config.width}, hidden {config.hidden_width}",
            f"  {config.num_heads} heads of {config.head_width}, {config.num_kv_heads} for keys and values",
            f"  {config.vocab_size} tokens, {config.sequence_length} positions, output {output}",
            f"  {_scaled(flops_per_token(config))}FLOP per trained token, causal attention counted once",
        ]
    return "\n".join(lines)


def _scaled(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g} {unit}".rstrip() if unit else f"{number:g}"
        number /= 1000
    return f"{number:.4g} G"
