"""The decisions of an exchange, without memory: what a word means, and what it may become.

The real exchange and its model take every decision from here: whether a slot may be claimed, what a seal says, which slot of the state
the next version gets, when a version may flip. Nothing is ever reset: each word names the round or version it belongs to. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from argosy.errors import ConfigError
from argosy.move.trees import Node

NONE = -1
_VERSION_BITS, _SLOT_BITS, _EPOCH_BITS = 40, 4, 16
_HOLDER_BITS, _TURN_BITS = 16, 8
_MASK = (1 << 64) - 1
MOST_VERSION = (1 << _VERSION_BITS) - 1
MOST_HOLDERS = (1 << _HOLDER_BITS) - 1
FIRST_PIN = 1 << (_HOLDER_BITS + _TURN_BITS)
"""The words of pins begin here; those below say that there is none."""


class Round(msgspec.Struct, frozen=True, order=True):
    """One gathering of gradients: from a state version, for a step; a step with several losses has several parts."""

    version: int
    step: int
    part: int = 0

    def __post_init__(self) -> None:
        if not (
            0 <= self.version < MOST_VERSION and 0 <= self.step < 1 << 60 and 0 <= self.part < 256
        ):
            raise ConfigError(
                f"round of version {self.version}, step {self.step}, part {self.part}",
                fix="count each from 0; a step has at most 256 parts",
            )

    @property
    def tag(self) -> int:
        """The round as a word, never 0."""
        return _mix(self.version, self.step, self.part)

    def __str__(self) -> str:
        part = f", part {self.part}" if self.part else ""
        return f"step {self.step} from version {self.version}{part}"


@functools.lru_cache(maxsize=4096)
def seal_of(round: Round, node: Node) -> int:
    """The word that makes a block valid; 0 is a block that is being written."""
    return _mix(round.version, round.step, round.part, node.first, node.size)


def read_tag(round: Round, generation: int) -> int:
    """The word of a member that has read all it needs of a round; grows from round to round. In a new generation everybody reads again."""
    return (generation & 0xFFFFF) << 44 | (round.step & 0xFFFFFFFFF) << 8 | round.part


def is_claimable(claim: int, seal: int, is_needed: bool) -> bool:
    """Whether a slot may be taken: nobody writes to it, and its block is not among those that cover this round's lanes."""
    return claim == 0 and (seal == 0 or not is_needed)


def claim_of(owner: int) -> int:
    """The word of a slot that this owner writes to; 0 is a slot that nobody writes to."""
    return owner + 1


def is_over(state: State, round: Round, done: Sequence[bool]) -> bool:
    """Whether others have finished a round: its version is past, or all its pages are done. Its slots may then hold other blocks.

    A round without pages (lanes computed without an update) is over with its version alone.
    """
    return state.version > round.version or (bool(done) and all(done))


def entry(words: Collection[int], generation: int) -> Literal["all", "late", "past"]:
    """How far the members are with entering a generation, by the words that they write then: some are late, or it is past for one of them."""
    if max(words) > entered_word(generation):
        return "past"
    return "all" if min(words) == entered_word(generation) else "late"


def entered_word(generation: int) -> int:
    """What a rank writes when it enters a generation; 0: it has entered none."""
    return generation + 1


class State(NamedTuple):
    """The state word: the committed version, its slot, the slot in which the next one is made, and a count of pins taken."""

    version: int
    slot: int
    coming: int = NONE
    epoch: int = 0

    @classmethod
    def of(cls, word: int) -> State:
        """What a word says; 0 is version 0 in slot 0."""
        version = word >> (64 - _VERSION_BITS)
        slot = (word >> (_SLOT_BITS + _EPOCH_BITS)) & ((1 << _SLOT_BITS) - 1)
        coming = (word >> _EPOCH_BITS) & ((1 << _SLOT_BITS) - 1)
        return cls(version, slot, coming - 1, word & ((1 << _EPOCH_BITS) - 1))

    @property
    def word(self) -> int:
        """The state as 64 bits."""
        front = self.version << (64 - _VERSION_BITS) | self.slot << (_SLOT_BITS + _EPOCH_BITS)
        return front | (self.coming + 1) << _EPOCH_BITS | self.epoch


def begun(state: State, pinned: Collection[int], num_slots: int) -> State | None:
    """The state in which the next version has a slot that is neither the current one nor pinned; None when there is none."""
    if state.coming != NONE:
        return state
    free = (slot for slot in range(num_slots) if slot != state.slot and slot not in pinned)
    slot = next(free, None)
    return None if slot is None else state._replace(coming=slot)


def flipped(state: State, version: int, done: Collection[int], num_pages: int) -> State | None:
    """The state with `version` committed; None when it is not the next one, has no slot, or a page is not done."""
    if state.version + 1 != version or state.coming == NONE or len(done) != num_pages:
        return None
    return State(version, state.coming, NONE, state.epoch)


def pinning(state: State) -> State:
    """The state after a pin of the current version: whoever chose a slot without seeing the pin must choose again."""
    return state._replace(epoch=(state.epoch + 1) & ((1 << _EPOCH_BITS) - 1))


class Pin(NamedTuple):
    """A slot's word of an owner: the version that is kept there, how many have it or still try to, how often one was given back."""

    version: int = NONE
    holders: int = 0
    turn: int = 0

    @classmethod
    def of(cls, word: int) -> Pin:
        """What a word says; 0 is no pin."""
        turn = (word >> _HOLDER_BITS) & ((1 << _TURN_BITS) - 1)
        return cls((word >> (_HOLDER_BITS + _TURN_BITS)) - 1, word & MOST_HOLDERS, turn)

    @property
    def word(self) -> int:
        """The pin as 64 bits."""
        back = self.turn << _HOLDER_BITS | self.holders
        return (self.version + 1) << (_HOLDER_BITS + _TURN_BITS) | back


def pinned(pin: Pin, version: int) -> Pin | None:
    """The pin with one more holder of `version`, in whose place an older one was only tried; None when the slot is a later version's by now."""
    if pin.version > version:
        return None
    if pin.version < version:
        return Pin(version, 1, pin.turn)
    return pin._replace(holders=min(pin.holders + 1, MOST_HOLDERS))


def withdrawn(pin: Pin, tried: Pin) -> Pin | None:
    """The pin without one who tried in vain: it stays if others hold it. None when there is nothing of that one in it any more."""
    if (pin.version, pin.turn) != (tried.version, tried.turn) or pin.holders == MOST_HOLDERS:
        return None
    return given_back(pin) if pin.holders == 1 else pin._replace(holders=pin.holders - 1)


def given_back(pin: Pin) -> Pin:
    """No pin; who still tries for the old one has nothing to take back of a later one."""
    return Pin(turn=(pin.turn + 1) & ((1 << _TURN_BITS) - 1))


def _mix(*numbers: int) -> int:
    """64 bits of which each depends on every number; odd, so never 0."""
    value = len(numbers)
    for number in numbers:
        value = (value ^ number) * 0x9E3779B97F4A7C15 & _MASK
        value = (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
        value ^= value >> 32
    return value | 1
