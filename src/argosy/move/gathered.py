"""What a wait for all lanes returns: the blocks that cover them, and their sum in the order of the canonical tree.

Made by exchange.py and remote.py alike, read by the trainer: which parameters got a gradient, the totals of the loss terms, the extra bytes of each block.
Holds no memory of its own: the gradients stay in their slots until `reduce`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from argosy.errors import ConfigError
from argosy.move import kernels, slices, trees
from argosy.move.headers import Block, Contents
from argosy.move.layout import Layout
from argosy.move.rounds import Round
from argosy.move.trees import Node


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that cover all lanes of a round exactly once."""

    round: Round
    blocks: tuple[Block, ...]
    program: tuple[int, ...]
    touched: frozenset[str]
    """Parameters that got a gradient in some lane; the others' gradient is None."""
    terms: dict[str, tuple[float, float]]
    """(sum, count) of each term over all lanes, in the order of the tree."""
    extras: tuple[tuple[Node, bytes], ...]
    """The extra bytes of each block, with its lanes."""


class Claim(Protocol):
    """A slot to write one block to."""

    round: Round
    node: Node

    @property
    def flat(self) -> torch.Tensor:
        """The whole gradient space, float32."""

    def gradient(self, name: str) -> torch.Tensor:
        """The elements of one parameter, flat, in their own dtype."""

    def zero(self) -> None:
        """Set all gradients to zero; before the first lane of the block."""

    def release(self) -> None:
        """Give the slot back without a block."""


def values_of(flat: torch.Tensor, layout: Layout, name: str) -> torch.Tensor:
    """The elements of one parameter in a flat space, in their own dtype."""
    place = flat[slice(*layout.span(name))]
    is_double = layout.parameters[layout.index_of(name)].is_double
    return place.view(torch.float64) if is_double else place


def add_pages(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    program: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    doubles: Sequence[bool],
) -> list[float]:
    """`kernels.reduce_pages`, where some pages are of float64."""
    if not any(doubles):
        return kernels.reduce_pages(out, inputs, program, bounds)
    plain = [bound for bound, is_double in zip(bounds, doubles, strict=True) if not is_double]
    found = iter(kernels.reduce_pages(out, inputs, program, plain))
    wide, wide_inputs = out.view(torch.float64), [each.view(torch.float64) for each in inputs]
    return [
        slices.reduce_page(wide, wide_inputs, program, start // 2, stop // 2)
        if is_double
        else next(found)
        for (start, stop), is_double in zip(bounds, doubles, strict=True)
    ]


def add_slots(into: torch.Tensor, other: torch.Tensor, layout: Layout) -> None:
    """into += other, over all of the flat space."""
    if not layout.double_pages:
        kernels.reduce(into, [into, other])
        return
    for parameter in layout.parameters:
        target = values_of(into, layout, parameter.name)
        kernels.reduce(target, [target, values_of(other, layout, parameter.name)])


def gather(
    round: Round, blocks: Sequence[Block], contents: Sequence[Contents], layout: Layout
) -> Gathered:
    """Add up what blocks that cover all lanes bring along."""
    program = _program(tuple(block.node for block in blocks), layout.num_lanes)
    whole = trees.evaluate(program, contents, Contents.plus)
    return Gathered(
        round=round,
        blocks=tuple(blocks),
        program=program,
        touched=layout.names_of(whole.touched),
        terms=dict(zip(layout.terms, whole.terms, strict=True)),
        extras=tuple((b.node, c.extra) for b, c in zip(blocks, contents, strict=True)),
    )


@functools.lru_cache(maxsize=64)
def _program(nodes: tuple[Node, ...], num_lanes: int) -> tuple[int, ...]:
    """The same few in every step."""
    return tuple(trees.program(nodes, num_lanes))


def contents_of(
    layout: Layout,
    touched: Sequence[str] | frozenset[str] | None,
    terms: dict[str, tuple[float, float]] | None,
    extra: bytes,
) -> Contents:
    """Check what a caller gives along with a block."""
    given = terms or {}
    unknown = [name for name in given if name not in layout.terms]
    if unknown:
        raise ConfigError(
            f"term {unknown[0]!r} is not in the layout", fix=f"it has {', '.join(layout.terms)}"
        )
    if len(extra) > layout.extra_bytes:
        raise ConfigError(
            f"{len(extra)} extra bytes, the layout has room for {layout.extra_bytes}",
            fix="make the layout with a larger extra_bytes",
        )
    if touched is None or touched == layout.all_names:
        bits = layout.all_touched
    else:
        bits = sum({1 << layout.index_of(name) for name in touched})
    return Contents(
        touched=bits,
        terms=tuple(given.get(name, (0.0, 0.0)) for name in layout.terms),
        # All of the room is written: what a slot held before must not show.
        extra=extra.ljust(layout.extra_bytes, b"\0"),
    )


def total(partials: Sequence[float]) -> float:
    """Partials added in page order."""
    result = 0.0
    for partial in partials:
        result += partial
    return result
