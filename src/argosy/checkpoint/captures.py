"""What a save beside training takes of a state in the call itself, so that all the rest is done while training goes on.

Structure and values are written down, what may change at once is set aside, and what only an optimizer's step changes is remembered with its version
(guards.py). A book is made of that later, in another thread. A state of which it cannot be taken, because its modules make state of their own or too much
of it may change, is gathered in the call instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from argosy.checkpoint import trees
from argosy.checkpoint.books import Aside, Book, Part, is_array, place_of
from argosy.checkpoint.guards import Guards
from argosy.move.placements import Pieces

MOST_CLONED_BYTES = 64 << 20
"""What may change at once is set aside when it is little; more is copied to its place before `save` returns."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
Later = Callable[[Book], None]
"""Writes a part of the state, as it was, into a book."""


class NotTaken(Exception):
    """A part of the state must be gathered in the call."""


class Taken:
    """What was set aside of a state, and whose state it is."""

    def __init__(self, guards: Guards, rank: int) -> None:
        self.rank = rank
        self.guards = guards
        self._guarded = set(map(id, guards.tensors))
        self.aside: dict[int, Aside] = {}
        self._room = MOST_CLONED_BYTES

    def tensors(self, values: Sequence[torch.Tensor]) -> None:
        """Set aside those of them that something else than an optimizer's step may change."""
        guarded = self._guarded
        for value in values:
            if id(value) not in guarded:
                self.tensor(value)

    def tensor(self, value: torch.Tensor) -> None:
        """Set it aside, unless only an optimizer's step changes it."""
        if id(value) in self._guarded or id(value) in self.aside:
            return
        if type(value) not in _PLAIN or value.layout != torch.strided or value.is_nested:
            raise NotTaken
        self._room -= value.nbytes
        if self._room < 0 or not value.is_contiguous() or value.is_meta:
            raise NotTaken
        self.aside[id(value)] = Aside(value, value.detach().clone(), place_of(value))


class Leaves:
    """Tensors and bytes of a tree that is encoded now and written into a book later."""

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self._found: list[tuple[str, Any]] = []

    def note(self, path: str, value: Any) -> dict[str, Any] | None:
        """As Book.store."""
        if isinstance(value, Pieces):
            raise NotTaken
        if isinstance(value, torch.Tensor):
            self._taken.tensor(value)
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self._found.append((path, bytes(value)))
            return {"$bytes": path}
        elif is_array(value):
            self._found.append((path, value.copy()))
            return {"$array": path}
        else:
            return None
        self._found.append((path, value))
        return {"$tensor": path}

    def give(self, book: Book, tree: Any) -> Any:
        """Put them into the book; the tree as it stands in it."""
        for path, value in self._found:
            book.store(path, value)
        tied = {path: book.aliases[path] for path, _ in self._found if path in book.aliases}
        return trees.renamed(tree, tied) if tied else tree


class Captured:
    """A state as it was in the call."""

    def __init__(self, guards: Guards, taken: Taken, parts: Iterable[Later]) -> None:
        self.guards = guards
        self._taken = taken
        self._parts = list(parts)

    def book(self) -> Book:
        """Everything of it; once, in whatever thread."""
        taken = self._taken
        book = Book(taken.rank, aside=taken.aside, addresses=self.guards.places())
        for write in self._parts:
            write(book)
        return book


def capture(parts: Mapping[str, Part], guards: Guards, rank: int) -> Captured | None:
    """The state as it is now; None when it must be gathered in the call.

    A part that can be written into a book after the call has a method `take`, which says how or raises NotTaken.
    """
    if not guards.tensors:
        return None
    taken = Taken(guards, rank)
    found = []
    try:
        for part in parts.values():
            # Not by isinstance: of a protocol that takes longer than most of what is done here.
            take = getattr(part, "take", None)
            if take is None:
                return None
            found.append(take(taken))
    except NotTaken:
        return None
    return Captured(guards, taken, found)
