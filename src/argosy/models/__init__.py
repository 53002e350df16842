"""Reference models as plain `nn.Module`s, and generation with the same forward that trains them.

Configurations and counts (`sizes`) are readable without torch: names are loaded when they are first used. Any other
`nn.Module` trains just as well; nothing in the runtime asks for a class of this folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.models.descriptions import describe, num_parameters
    from argosy.models.generation import Emission, Generated, generate, stream, token_logprobs
    from argosy.models.sizes import XS, GPTConfig, S, flops_per_token
    from argosy.models.transformer import GPT

__all__ = [
    "GPT",
    "XS",
    "Emission",
    "GPTConfig",
    "Generated",
    "S",
    "describe",
    "flops_per_token",
    "generate",
    "num_parameters",
    "stream",
    "token_logprobs",
]

_HOMES = {
    "descriptions": ("describe", "num_parameters"),
    "generation": ("Emission", "Generated", "generate", "stream", "token_logprobs"),
    "sizes": ("XS", "GPTConfig", "S", "flops_per_token"),
    "transformer": ("GPT",),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"argosy.models.{module}"), name)
    raise AttributeError(f"module 'argosy.models' has no attribute {name!r}")
