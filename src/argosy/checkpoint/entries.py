"""One tensor of a state as the checkpoint sees it: its name, class and boxes, and the memory they lie in.

Made by the registry from models, optimizers and values; read by the gatherer on the way out, filled by the loader on the way in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from argosy.checkpoint.layouts import Wanted
from argosy.checkpoint.names import Kind
from argosy.errors import ConfigError
from argosy.move import placements
from argosy.move.boxes import Box, Held


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A global tensor and what this process holds of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    held: tuple[Held, ...]
    buffers: list[torch.Tensor]
    meaning: str | None = None
    """"complex128" where the elements' two halves are the last dim."""

    @property
    def wanted(self) -> Wanted:
        """Without the memory."""
        return Wanted(name=self.name, dtype=self.dtype, shape=self.shape, kind=self.kind)

    @property
    def address(self) -> int:
        """Of its memory here, the first of it."""
        return self.buffers[0].data_ptr() if self.buffers else 0

    @property
    def boxes(self) -> list[Box]:
        """What this process holds."""
        return [one.box for one in self.held]


def entry_of(
    name: str, value: torch.Tensor | placements.Pieces, kind: Kind, *, is_destination: bool = False
) -> Entry:
    """A tensor, DTensor or pieces as an entry; refuses what has no plain bytes on this host, by name."""
    meaning = None
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.complex128:
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise ConfigError(
                    f"{name} is a sharded complex128 tensor", fix="save its real view instead"
                )
            value, meaning = torch.view_as_real(value.detach()), "complex128"
        if value.is_conj() or value.is_neg():
            value = value.detach().resolve_conj().resolve_neg()
    found = placements.describe(name, value, is_destination=is_destination)
    return Entry(
        name=name,
        dtype=found.dtype,
        shape=found.shape,
        kind=kind,
        held=found.held,
        buffers=placements.buffers(value),
        meaning=meaning,
    )
