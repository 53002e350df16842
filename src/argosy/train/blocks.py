"""This rank's blocks of a round: claimed, filled with the gradients of their lanes, published.

What is published counts from then on, whoever dies. A lone rank takes all its blocks together and publishes them when the last one is filled, or when it is interrupted: nobody waits for one of them, and those
that it takes with it when it dies are computed again by whoever replaces it. Called by transaction.py, which knows what a lane is computed from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from argosy.errors import NoRoom

if TYPE_CHECKING:
    from argosy.move.exchange import Exchange, SlotClaim
    from argosy.move.rounds import Round
    from argosy.move.trees import Node
    from argosy.train.crew import Crew
    from argosy.train.lanes import Terms
    from argosy.train.patience import Patience

Fill = Callable[["SlotClaim"], tuple[frozenset[str], "Terms"]]
"""Computes the lanes of a claim: the parameters touched, and the totals of the loss terms."""


class Blocks:
    """Claims and publishes on behalf of one rank."""

    def __init__(self, crew: Crew, exchange: Exchange, patience: Patience) -> None:
        self._crew = crew
        self._exchange = exchange
        self._patience = patience

    def compute(
        self, round: Round, nodes: list[Node], fill: Fill, published: Callable[[SlotClaim], None]
    ) -> None:
        """Fill and publish those that are not there yet; `published` hears of each just before. Ends early, by raising, when the membership has changed."""
        for group in self._groups(round, nodes):
            claims: list[SlotClaim] = []
            filled: list[tuple[frozenset[str], Terms]] = []
            try:
                for node in group:
                    claim = self._claim(round, node)
                    if claim is not None:
                        claims.append(claim)
                for claim in claims:
                    filled.append(fill(claim))
                    self._crew.look()
            finally:
                for claim, (touched, terms) in zip(claims, filled, strict=False):
                    published(claim)
                    self._exchange.publish(claim, touched=touched, terms=terms)
                for claim in claims[len(filled) :]:
                    claim.release()

    def _groups(self, round: Round, nodes: list[Node]) -> list[list[Node]]:
        # With blocks of the dead in some slots there may be too few for all at once.
        is_alone = len(self._crew.members) == 1 and not self._exchange.published(round)
        if is_alone and len(nodes) <= self._exchange.layout.slots:
            return [nodes]
        return [[node] for node in nodes]

    def _claim(self, round: Round, node: Node) -> SlotClaim | None:
        """A slot for a block; while all slots hold blocks that wait for a sibling, somebody else's will free one."""

        def claim(deadline: float) -> SlotClaim | None:
            while True:
                try:
                    return self._exchange.claim(round, node)
                except NoRoom:
                    self._exchange.wait_progress(deadline=deadline)

        return self._patience.wait(claim, lambda: self._exchange.writers(round))
