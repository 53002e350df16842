"""What a wait for all lanes returns: the blocks that cover them, and their sum in the order of the canonical tree.

Made by exchange.py and remote.py alike, read by the trainer: which parameters got a gradient, the totals of the loss terms, the extra bytes of each block.
Holds no memory of its own: the gradients stay in their slots until `reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import torch

from argosy.errors import ConfigError
from argosy.move import kernels, trees
from argosy.move.headers import Block, Contents
from argosy.move.layout import PAGE_ELEMENTS, Layout
from argosy.move.rounds import Round
from argosy.move.trees import Node

_ROWS = 64
"""A page's squares are added in rows of float32 and then in float64: fixed by the page alone."""


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
        """The elements of one parameter, flat."""

    def zero(self) -> None:
        """Set all gradients to zero; before the first lane of the block."""

    def release(self) -> None:
        """Give the slot back without a block."""


def gather(
    round: Round, blocks: Sequence[Block], contents: Sequence[Contents], layout: Layout
) -> Gathered:
    """Add up what blocks that cover all lanes bring along."""
    program = trees.program([block.node for block in blocks], layout.num_lanes)
    whole = trees.evaluate(program, contents, Contents.plus)
    names = (p.name for i, p in enumerate(layout.parameters) if whole.touched >> i & 1)
    return Gathered(
        round=round,
        blocks=tuple(blocks),
        program=tuple(program),
        touched=frozenset(names),
        terms=dict(zip(layout.terms, whole.terms, strict=True)),
        extras=tuple((b.node, c.extra) for b, c in zip(blocks, contents, strict=True)),
    )


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
    if touched is None:
        bits = (1 << len(layout.parameters)) - 1
    else:
        bits = sum({1 << layout.index_of(name) for name in touched})
    return Contents(
        touched=bits,
        terms=tuple(given.get(name, (0.0, 0.0)) for name in layout.terms),
        extra=extra,
    )


def add_page(out: torch.Tensor, inputs: Sequence[torch.Tensor], program: Sequence[int]) -> float:
    """Add one page in tree order, and return the sum of its squares; infinite or NaN when an element is."""
    kernels.reduce_tree(out, inputs, program)
    return square_sum(out)


def square_sum(page: torch.Tensor) -> float:
    """The sum of squares of a page, in an order that depends on its length alone; finite whenever all elements are."""
    width = -(-page.numel() // _ROWS)
    full = page.numel() // width * width
    norms = torch.linalg.vector_norm(page[:full].view(-1, width), dim=1).double()
    rest = page[full:].double()
    result = float(norms.dot(norms) + rest.dot(rest))
    if math.isfinite(result):
        return result
    # Squares of large elements overflow float32; float64 holds those of any page.
    return float(page.double().square_().sum())


def square_sums(flat: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> list[float]:
    """`square_sum` of each of these pages of a flat tensor; neighbours that are full pages are read in one go."""
    results: list[float] = []
    position = 0
    while position < len(bounds):
        following = position
        while (
            following < len(bounds)
            and bounds[following][1] - bounds[following][0] == PAGE_ELEMENTS
            and bounds[following][0] == bounds[position][0] + (following - position) * PAGE_ELEMENTS
        ):
            following += 1
        if following > position + 1:
            piece = flat[bounds[position][0] : bounds[following - 1][1]]
            results += _sums_of_full(piece.view(following - position, _ROWS, -1))
            position = following
        else:
            results.append(square_sum(flat[slice(*bounds[position])]))
            position += 1
    return results


def _sums_of_full(pages: torch.Tensor) -> list[float]:
    norms = torch.linalg.vector_norm(pages, dim=2).double()
    found = [float(row.dot(row)) for row in norms]
    return [
        value if math.isfinite(value) else square_sum(page.view(-1))
        for value, page in zip(found, pages, strict=True)
    ]


def runs(pages: Sequence[int], bounds: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Pages that follow one another, as ranges of elements: each is added in one pass."""
    first = 0
    for position in range(1, len(pages) + 1):
        if position == len(pages) or pages[position] != pages[position - 1] + 1:
            yield bounds[first][0], bounds[position - 1][1]
            first = position


def total(partials: Sequence[float]) -> float:
    """Partials added in page order."""
    result = 0.0
    for partial in partials:
        result += partial
    return result
