"""Snapshots in memory for the guard's policy `rewind`: every so many steps the committed version is kept, and a bad step goes back to it.

The pin belongs to the run and not to a rank (an observer's number that nobody else uses), so it outlives every rank. A third slot of the state holds the snapshot. Whether a bad step finds one is agreed on:
after that its bytes stay until the next version is committed. Called by transaction.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy.errors import GenerationChanged
from argosy.train.guards import Guard
from argosy.train.memories import Memories, Version
from argosy.train.roster import VERDICT, Roster

if TYPE_CHECKING:
    from argosy.move.layout import Layout
    from argosy.move.versions import Versions


class Snapshots:
    """The run's own pin."""

    def __init__(
        self, state: Versions, layout: Layout, memories: Memories, roster: Roster, guard: Guard
    ) -> None:
        self._state = state
        self._layout = layout
        self._memories = memories
        self._roster = roster
        self._guard = guard
        self._owner = layout.num_owners - 1
        self._is_kept = guard.policy == "rewind"

    def keep(self, version: int, slot: int) -> None:
        """Pin the committed version if its turn has come, and let the one before go; every rank does, the pin is one."""
        if not self._is_kept:
            return
        held = self._state.pins().get(self._owner, [])
        step = int(self._memories.version(slot).ledger["step"])
        if held and step % self._guard.snapshot_every:
            return
        try:
            self._state.pin(version, owner=self._owner)
        except GenerationChanged:
            return  # the others are further: they have pinned it
        for other, _ in held:
            if other != version:
                self._state.unpin(other, owner=self._owner)

    def is_rewound(self, made: list[int]) -> bool:
        """Whether one of the parts that are made of the next version goes back to a snapshot."""
        slot = self._state.making() if made and self._is_kept else None
        if slot is None:
            return False
        coming = self._memories.version(slot)
        return any(coming.result(part).get("verdict") == "rewind" for part in made)

    def undo(self, made: list[int], snapshot: Version, new: Version) -> None:
        """Let the parts that are made be the snapshot's too.

        Everybody who has pages of the part that went bad does so before they are done: then all of them are, whoever dies. They write the same bytes.
        """
        for part in made:
            for name in self._layout.parts[part]:
                new.copy_from(snapshot, name)

    def agree(self, version: int, rank: int) -> int | None:
        """The slot to go back to, the same on every rank; None: there is no snapshot."""
        held = self._state.pins().get(self._owner, [])
        own = max(held)[1] if held else -1
        found = int(self._roster.agree_on(version, VERDICT, rank, own))
        return None if found < 0 else found
