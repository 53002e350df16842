"""Buffers that forward was not seen to change when the trainer was made, and must not change later either.

What changes travels with the lanes and is committed; a change of anything else would stay in the process that made it, and be another one on each rank. It is looked for around every block of lanes: in all
bytes of small buffers, in some of large ones. What user code sets between two steps is its own affair. Used by lanes.py.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from argosy.errors import ConfigError

_MOST_BYTES = 1 << 14
"""Of one buffer, that are compared."""


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the model's state, by name."""
    saved = set(model.state_dict())
    return {name: b for name, b in model.named_buffers() if name in saved and b.numel()}


class Stillness:
    """The buffers of a model that stay as they are while lanes are computed."""

    def __init__(self, model: torch.nn.Module, changing: Collection[str]) -> None:
        """`changing` are those that are committed with each step."""
        self._buffers = {n: b for n, b in saved_buffers(model).items() if n not in changing}
        self._known: dict[str, torch.Tensor] = {}

    def note(self) -> None:
        """Lanes are about to be computed."""
        self._known = {name: _image(buffer) for name, buffer in self._buffers.items()}

    def check(self, step: int) -> None:
        """ConfigError when one has changed since."""
        for name, known in self._known.items():
            if not torch.equal(_image(self._buffers[name]), known):
                raise ConfigError(
                    f"buffer {name!r} was changed by the loss in step {step}, and not when the trainer was made",
                    fix="give run.trainer() a loss= that changes it, too: it is called once, to see which buffers are to be committed with each step",
                )


def _image(buffer: torch.Tensor) -> torch.Tensor:
    """Its bytes, or some of them."""
    flat = buffer.detach().reshape(-1).view(torch.uint8)
    return flat[:: -(-flat.numel() // _MOST_BYTES)].clone()
