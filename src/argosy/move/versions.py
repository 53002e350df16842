"""Versions of the state: which slot holds the committed one, where the next one is made, when it flips, who still reads an old one.

Only words live here, never the state itself: the trainer keeps its tensors in arenas, one set per state slot. Pages say which version they
are done or refreshed for, so nothing is reset and everything can be redone by another owner after a crash. The flip is one
compare-and-swap, done by whoever sees all pages done. Part of exchange.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from argosy.errors import ConfigError, GenerationChanged, InvariantError, TimedOut
from argosy.move import rounds
from argosy.move.layout import Layout
from argosy.move.rounds import NONE, Pin, Round, State
from argosy.move.words import Memory, Numbers, Places, Progress

_LINE = 64


class Versions:
    """The versions of one exchange, as one process sees them."""

    def __init__(self, memory: Memory, progress: Progress, layout: Layout) -> None:
        places = layout.places
        self._memory = memory
        self._progress = progress
        self._layout = layout
        self._places = places
        self._pin_bytes = (layout.num_versions * 8 + _LINE - 1) // _LINE * _LINE
        self._pins = memory.numbers(places.pins, layout.num_owners * self._pin_bytes // 8)
        self._done = memory.numbers(places.done, layout.num_pages)
        self._refreshed = memory.numbers(places.refreshed, layout.num_pages)
        self._pages: dict[int, Places] = {}
        self.owner = NONE

    def current(self) -> tuple[int, int]:
        """(version, slot) that is committed."""
        state = self._state()
        return state.version, state.slot

    def making(self) -> int | None:
        """The slot in which the next version is made, in which somebody may be writing; None: nobody has begun it."""
        coming = self._state().coming
        return None if coming == NONE else coming

    def install(self, version: int) -> bool:
        """Begin a fresh exchange at `version` in slot 0, after a load from disk; whether it was fresh."""
        if not 0 <= version < rounds.MOST_VERSION:
            raise ConfigError(f"version {version}", fix="count versions from 0")
        if not self._memory.swap(self._places.state, 0, State(version, 0).word):
            return False
        self._progress.tell()
        return True

    def begin(self, version: int, *, deadline: float) -> int:
        """The slot in which `version` is made: the same for all who ask, neither the committed one nor a pinned one.

        Ask only with a page of yours in `undone(version)`: without it somebody else may commit the version meanwhile.
        While every other slot is pinned this waits for one; TimedOut names who pins them.
        """
        found: list[int] = []

        def has_begun() -> bool:
            found[:] = self._try_begin(version)
            return bool(found)

        self._progress.wait(has_begun, deadline, lambda: self._all_pinned(version))
        return found[0]

    def mark_done(self, version: int, pages: Iterable[int]) -> None:
        """These pages of `version` are written. Whoever completes them should call `try_flip`."""
        for page in pages:
            self._memory.store(self._places.done + 8 * self._checked(page), version)
        self._progress.tell()

    def undone(self, version: int) -> list[int]:
        """The pages that are not written yet for `version`."""
        return np.flatnonzero(self._done < version).tolist()

    def is_over(self, round: Round) -> bool:
        """Whether others have finished a round."""
        pages, coming = self.pages_of(round), round.version + 1
        done = []
        if len(pages):
            # Mostly the first page tells that there is something left to do.
            is_first_done = bool(self._done[pages[0]] >= coming)
            done = [is_first_done and bool(self._all_at(self._done[pages], coming))]
        return rounds.is_over(self._state(), round, done)

    def pages_of(self, round: Round) -> Places:
        """The pages that a round concerns, ascending."""
        if round.part not in self._pages:
            pages = self._layout.pages_of_part(round.part)
            self._pages[round.part] = np.asarray(pages, dtype=np.int64)
        return self._pages[round.part]

    def wait_done(self, round: Round, *, deadline: float) -> None:
        """Wait until all pages of a round are done. Between the parts of a step: until then its blocks may be needed again."""
        self._progress.wait(
            lambda: self.is_over(round), deadline, lambda: self._not_done(round.version + 1)
        )

    def try_flip(self, version: int) -> bool:
        """Commit `version` if all its pages are done; whether it is committed now, by whomever."""
        while True:
            state = self._state()
            if state.version >= version:
                return True
            done = self._all_at(self._done, version)
            after = rounds.flipped(state, version, done, self._layout.num_pages)
            if after is None:
                return False
            if self._memory.swap(self._places.state, state.word, after.word):
                self._progress.tell()
                return True

    def wait_flip(self, version: int, *, deadline: float) -> int:
        """Wait until `version` is committed, committing it if need be; its slot.

        GenerationChanged when a later version is committed already: this process was left behind.
        """
        self._progress.wait(
            lambda: self.try_flip(version), deadline, lambda: self._not_done(version)
        )
        committed, slot = self.current()
        if committed != version:
            raise GenerationChanged(
                f"version {committed} is committed, and this process waited for {version}",
                fix="enter the current generation and go on from its version",
            )
        return slot

    def mark_refreshed(self, version: int, pages: Iterable[int]) -> None:
        """The weights of these pages are those of `version`."""
        for page in pages:
            self._memory.store(self._places.refreshed + 8 * self._checked(page), version + 1)
        self._progress.tell()

    def unrefreshed(self, version: int) -> list[int]:
        """The pages whose weights are not yet those of `version`."""
        return np.flatnonzero(self._refreshed < version + 1).tolist()

    def wait_refreshed(
        self, version: int, *, deadline: float, weights: torch.Tensor | None = None
    ) -> None:
        """Wait until all weights are those of `version`. `weights` is for exchanges between hosts: here all share one copy."""
        self._progress.wait(
            lambda: bool(self._all_at(self._refreshed, version + 1)),
            deadline,
            lambda: self._not_refreshed(version),
        )

    # --- pins ---------------------------------------------------------------------------------

    def pin(self, version: int | None = None, *, owner: int | None = None) -> tuple[int, int]:
        """Keep the committed version (and refuse if it is not `version`): its slot is not reused until `unpin`.

        Returns (version, slot). A pin belongs to this process's rank or observer number, or to an `owner` that several processes
        stand for; again is fine.
        """
        owner = self._owned() if owner is None else owner
        while True:
            state = self._state()
            if version is not None and state.version != version:
                raise GenerationChanged(
                    f"version {version} cannot be pinned: version {state.version} is committed",
                    fix="pin the committed version, right after wait_flip",
                )
            tried = self._add_pin(owner, state)
            if tried is None:
                continue  # a later version has come into that slot
            if self._confirm_pin(state):
                return state.version, state.slot
            self._withdraw_pin(owner, state.slot, tried)

    def _confirm_pin(self, state: State) -> bool:
        """Change the state word: whoever has chosen a slot without seeing the pin fails to commit the choice. False when another version is committed.

        While it is the same one the pin stays: others who stand for its owner may count on it already.
        """
        version = state.version
        while state.version == version:
            if self._memory.swap(self._places.state, state.word, rounds.pinning(state).word):
                return True
            state = self._state()
        return False

    def unpin(self, version: int, *, owner: int | None = None) -> None:
        """Give a pin of this process, or of `owner` for all who stand for it, back; one that is not there is fine."""
        owner = self._owned() if owner is None else owner
        for slot in range(self._layout.num_versions):
            self._change_pin(
                owner, slot, lambda pin: rounds.given_back(pin) if pin.version == version else None
            )
        self._progress.tell()

    def pins(self) -> dict[int, list[tuple[int, int]]]:
        """(version, slot) of all pins, by owner."""
        found: dict[int, list[tuple[int, int]]] = {}
        # Mostly there are none, of many that there could be.
        # Compared first: others change the words while they are looked at, which numpy does not stand.
        for place in np.flatnonzero(self._pins >= rounds.FIRST_PIN).tolist():
            owner, slot = divmod(place, self._pin_bytes // 8)
            pin = Pin.of(self._memory.load(self._pin_at(owner, slot)))
            if pin.version != NONE:
                found.setdefault(owner, []).append((pin.version, slot))
        return found

    def sweep(self, owner: int) -> int:
        """Give back all pins of an owner that is dead; how many there were."""
        held = 0
        for slot in range(self._layout.num_versions):
            given_back = self._change_pin(
                owner, slot, lambda pin: rounds.given_back(pin) if pin.version != NONE else None
            )
            held += given_back is not None
        return held

    def _add_pin(self, owner: int, state: State) -> Pin | None:
        return self._change_pin(owner, state.slot, lambda pin: rounds.pinned(pin, state.version))

    def _withdraw_pin(self, owner: int, slot: int, tried: Pin) -> None:
        if self._change_pin(owner, slot, lambda pin: rounds.withdrawn(pin, tried)) is not None:
            self._progress.tell()

    def _change_pin(self, owner: int, slot: int, change: Callable[[Pin], Pin | None]) -> Pin | None:
        """Make of a pin what `change` says, and return that; None: it is to stay as it is."""
        at = self._pin_at(owner, slot)
        while True:
            word = self._memory.load(at)
            after = change(Pin.of(word))
            if after is None or self._memory.swap(at, word, after.word):
                return after

    # --- words --------------------------------------------------------------------------------

    def _state(self) -> State:
        return State.of(self._memory.load(self._places.state))

    def _try_begin(self, version: int) -> list[int]:
        """The slot, as a list of one, or an empty list while all others are pinned."""
        while True:
            state = self._state()
            if state.version + 1 != version:
                raise InvariantError(
                    f"version {version} cannot begin: version {state.version} is committed"
                )
            pinned = {slot for held in self.pins().values() for _, slot in held}
            after = rounds.begun(state, pinned, self._layout.num_versions)
            if after is None:
                return []
            if after == state or self._memory.swap(self._places.state, state.word, after.word):
                return [after.coming]

    def _all_at(self, words: Numbers, value: int) -> Sequence[int]:
        """Their positions, when all words have reached `value`; else none. What was written before those words is then visible."""
        if not bool((words >= value).all()):
            return ()
        self._progress.fence()
        return range(len(words))

    def _pin_at(self, owner: int, slot: int) -> int:
        return self._places.pins + owner * self._pin_bytes + 8 * slot

    def _owned(self) -> int:
        if self.owner == NONE:
            raise ConfigError(
                "this process has no place in the exchange yet", fix="call enter() or observe()"
            )
        return self.owner

    def _checked(self, page: int) -> int:
        if not 0 <= page < self._layout.num_pages:
            raise ConfigError(f"page {page} of {self._layout.num_pages}", fix="use layout.pages_of")
        return page

    def _all_pinned(self, version: int) -> TimedOut:
        held = ", ".join(
            f"{self._layout.name_of(owner)}: " + ", ".join(f"version {v}" for v, _ in pins)
            for owner, pins in self.pins().items()
        )
        return TimedOut(
            f"no slot for version {version}: all others are pinned ({held})",
            fix="let snapshots finish sooner, sweep dead owners, or give num_versions more slots",
        )

    def _not_done(self, version: int) -> TimedOut:
        return TimedOut(
            f"version {version} is not committed: pages {_few(self.undone(version))} are not done",
            fix="their owners are slow or gone: `argosy stacks`",
        )

    def _not_refreshed(self, version: int) -> TimedOut:
        pages = _few(self.unrefreshed(version))
        return TimedOut(
            f"weights of version {version}: pages {pages} are not refreshed",
            fix="their owners are slow or gone: `argosy stacks`",
        )


def _few(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:8]))
    return f"{text} and {len(numbers) - 8} more" if len(numbers) > 8 else text
