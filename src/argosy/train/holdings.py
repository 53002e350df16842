"""Which parameters, and so which pages, each member updates: a division by cost that every rank finds for itself.

Whole parameters go to one member each. Nothing of a result depends on the division; it is found anew when the membership changes. Used by transaction.py and replicated.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from argosy.move.layout import Layout
from argosy.train.shares import parameters_of


class Holdings:
    """The division among the present members."""

    def __init__(
        self, layout: Layout, members: Callable[[], tuple[int, ...]], position: Callable[[], int]
    ) -> None:
        self._layout = layout
        self._members = members
        self._position = position
        self._mine: list[list[str]] | None = None

    def forget(self) -> None:
        """The membership has changed."""
        self._mine = None

    @property
    def mine(self) -> list[list[str]]:
        """The names that this rank updates, by part."""
        if self._mine is None:
            parts = range(len(self._layout.pages_of_parts))
            self._mine = [self._names_of(self._position(), part) for part in parts]
        return self._mine

    def pages(self, part: int) -> list[int]:
        """This rank's pages of a part."""
        return self.pages_of(self.mine[part])

    def pages_of(self, names: list[str]) -> list[int]:
        """The pages of some parameters, in their order."""
        return [page for name in names for page in self._layout.pages_of(name)]

    def mine_among(self, pages: Collection[int], part: int | None = None) -> list[str]:
        """This rank's names that any of these pages belong to, of one part or of all."""
        wanted = set(pages)
        parts = self.mine if part is None else [self.mine[part]]
        return [name for each in parts for name in each if self._is_among(name, wanted)]

    def owners_of(self, pages: Collection[int]) -> list[int]:
        """The members that have any of these pages."""
        wanted = set(pages)
        parts = range(len(self._layout.pages_of_parts))
        return [
            rank
            for position, rank in enumerate(self._members())
            if any(
                self._is_among(name, wanted)
                for part in parts
                for name in self._names_of(position, part)
            )
        ]

    def is_first_among(self, part: int, names: list[str]) -> bool:
        """Whether the part's first parameter is one of these: its owner writes down what there is one of."""
        first = self._layout.parameter_of(self._layout.pages_of_part(part)[0])
        return self._layout.parameters[first].name in names

    def _is_among(self, name: str, wanted: set[int]) -> bool:
        return not wanted.isdisjoint(self._layout.pages_of(name))

    def _names_of(self, position: int, part: int) -> list[str]:
        layout = self._layout
        names = layout.parts[part] if layout.parts else [p.name for p in layout.parameters]
        costs = {name: layout.parameters[layout.indices[name]].room for name in names}
        return parameters_of(position, len(self._members()), costs)
