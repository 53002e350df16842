"""The audit of the first step: one block of lanes is computed twice, on two ranks, and its bits are compared.

What makes ranks differ without being seen (a private random generator, a library that flushes denormals, a read of the clock) shows here, with the name of the first parameter, before much is computed.
Called by transaction.py in exact mode.
"""

from __future__ import annotations

import torch

from argosy.errors import MismatchError
from argosy.move.gathered import values_of
from argosy.move.layout import Layout
from argosy.move.rounds import Round
from argosy.move.trees import Node


class PrivateClaim:
    """A slot in this process's own memory, which nobody reads."""

    def __init__(self, round: Round, node: Node, layout: Layout) -> None:
        self.round = round
        self.node = node
        self._layout = layout
        self._flat = torch.zeros(layout.num_elements)

    @property
    def flat(self) -> torch.Tensor:
        """The whole gradient space."""
        return self._flat

    def gradient(self, name: str) -> torch.Tensor:
        """The elements of one parameter."""
        return values_of(self._flat, self._layout, name)

    def zero(self) -> None:
        """Set all to zero."""
        self._flat.zero_()

    def release(self) -> None:
        """Nothing to give back."""


def compare(own: torch.Tensor, published: torch.Tensor, node: Node, layout: Layout) -> None:
    """MismatchError that names the first parameter whose bits differ."""
    for parameter in layout.parameters:
        kind = torch.int64 if parameter.is_double else torch.int32
        left = values_of(own, layout, parameter.name).view(kind)
        right = values_of(published, layout, parameter.name).view(kind)
        if torch.equal(left, right):
            continue
        count = int((left != right).sum())
        raise MismatchError(
            f"lanes {node.first} to {node.stop - 1} of the first step gave other bits when computed twice: "
            f"{parameter.name!r} differs in {count} of {parameter.numel} elements",
            fix='something private decides here: a generator of its own, a clock, threads; or use mode="fast"',
        )
