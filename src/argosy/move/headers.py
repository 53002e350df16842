"""Headers of the gradient slots: who writes to a slot, and which block it holds.

A writer takes the slot's claim, clears the seal, and only then stores; the seal comes last. A block counts while its seal agrees with
what the header says. Finished blocks belong to nobody: they stay valid when their writer dies. Used by exchange.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from argosy.errors import GenerationChanged
from argosy.move import layout as layouts
from argosy.move import rounds
from argosy.move.layout import BITMAP, CLAIM, COUNT, FIRST, OWNER, PART, SEAL, VERSION, Layout
from argosy.move.rounds import Round
from argosy.move.trees import Node, cover
from argosy.move.words import Memory, Progress

_PLACE, _WRITTEN, _CLAIMED = struct.Struct("2Q"), struct.Struct("3Q"), struct.Struct("6Q")


class Block(msgspec.Struct, frozen=True):
    """A finished sum of gradients over some lanes, in one slot."""

    slot: int
    node: Node
    seal: int
    owner: int


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """What a block brings along with its gradients."""

    touched: int
    """Bit i: parameter i got a gradient in one of the lanes."""
    terms: tuple[tuple[float, float], ...]
    """(sum, count) of each term."""
    extra: bytes = b""

    def plus(self, right: Contents) -> Contents:
        """The contents of the parent of two siblings; the extra bytes are the left one's."""
        terms = zip(self.terms, right.terms, strict=True)
        return Contents(
            touched=self.touched | right.touched,
            terms=tuple((a[0] + b[0], a[1] + b[1]) for a, b in terms),
            extra=self.extra,
        )


class Headers:
    """All headers of one exchange."""

    def __init__(self, memory: Memory, progress: Progress, layout: Layout) -> None:
        places = layout.places
        self._memory = memory
        self._progress = progress
        self._layout = layout
        self._start, self._stride = places.headers, places.header_bytes
        words = places.header_bytes // 8
        self._table = memory.numbers(places.headers, layout.slots * words).reshape(-1, words)
        self._bitmap_words = layouts.bitmap_words(layout)
        self._bytes = memory.bytes
        terms = f"{2 * len(layout.terms)}d"
        self._contents_of = struct.Struct(f"{8 * self._bitmap_words}s{terms}{layout.extra_bytes}s")

    def blocks(self, round: Round) -> list[Block]:
        """All finished blocks of a round, as they stand now."""
        return [block for slot in self._of_round(round) if (block := self._read(slot, round))]

    def cover(self, round: Round, blocks: Iterable[Block] | None = None) -> list[Block]:
        """The largest finished blocks of a round (of these, if given), in lane order."""
        found = self.blocks(round) if blocks is None else blocks
        by_node = {block.node: block for block in found}
        return [by_node[node] for node in cover(by_node, self._layout.num_lanes)]

    def may_cover(self, round: Round) -> bool:
        """Whether finished blocks may have all lanes; False only while one is missing. Cheaper than to look at each, and without any ordering."""
        key = [round.version, round.step, round.part]
        rows = self._table[:, : COUNT + 1].tolist()
        there = sum(row[COUNT] for row in rows if row[SEAL] and row[VERSION : PART + 1] == key)
        return bool(there >= self._layout.num_lanes)

    def is_full(self, round: Round) -> bool:
        """Whether every slot is being written or holds a block of this round: somebody may wait for room. Without any ordering."""
        key = [round.version, round.step, round.part]
        rows = self._table[:, : PART + 1].tolist()
        return all(row[CLAIM] or (row[SEAL] and row[VERSION:] == key) for row in rows)

    def claims(self, round: Round) -> Iterator[tuple[int, Node]]:
        """(owner, lanes) of the blocks of a round that are being written."""
        for slot in self._of_round(round):
            claim, seal = self._load(slot, CLAIM), self._load(slot, SEAL)
            if claim and not seal:
                row = self._table[slot]
                yield claim - 1, Node(int(row[FIRST]), int(row[COUNT]))

    def claim(
        self,
        round: Round,
        node: Node,
        owner: int,
        *,
        preferred: Sequence[int],
        seen: Sequence[Block],
    ) -> int | None:
        """Take a slot for a block and invalidate what it held; None when no slot is free. `seen`: the round's blocks a moment ago."""
        needed = {block.slot for block in self.cover(round, seen)}
        order = [*preferred, *(s for s in range(self._layout.slots) if s not in preferred)]
        for slot in order:
            if not self._try_claim(slot, slot in needed, owner):
                continue
            # It may have been claimed, finished and released since we looked. Now that it is ours it stays what it is.
            if slot in self._of_round(round) and any(b.slot == slot for b in self.cover(round)):
                self.release(slot, owner)
                continue
            self._invalidate(slot, round, node, owner)
            return slot
        return None

    def claim_block(self, block: Block, owner: int) -> bool:
        """Take the slot of a finished block, to change it."""
        if not self._memory.swap(self._at(block.slot, CLAIM), 0, rounds.claim_of(owner)):
            return False
        if self._load(block.slot, SEAL) == block.seal:
            return True
        self.release(block.slot, owner)
        return False

    def finish(self, slot: int, round: Round, node: Node, contents: Contents) -> Block:
        """Write the rest of the header, then the seal: from here on the block counts."""
        owner = int(self._table[slot, OWNER])
        bits = contents.touched.to_bytes(8 * self._bitmap_words, "little")
        terms = [number for term in contents.terms for number in term]
        at = self._at(slot, BITMAP)
        self._contents_of.pack_into(self._bytes, at, bits, *terms, contents.extra)
        _PLACE.pack_into(self._bytes, self._at(slot, FIRST), *node)
        seal = rounds.seal_of(round, node)
        self._memory.store(self._at(slot, SEAL), seal)
        self.release(slot, owner)
        return Block(slot, node, seal, owner)

    def contents(self, blocks: Sequence[Block]) -> list[Contents]:
        """What finished blocks bring along; GenerationChanged when one of them is gone."""
        found = [self._contents(block.slot) for block in blocks]
        self.check(blocks)
        return found

    def _contents(self, slot: int) -> Contents:
        """Without any ordering."""
        at = self._at(slot, BITMAP)
        bits, *terms, extra = self._contents_of.unpack_from(self._bytes, at)
        return Contents(
            touched=int.from_bytes(bits, "little"),
            terms=tuple(zip(terms[::2], terms[1::2], strict=True)),
            extra=extra,
        )

    def check(self, blocks: Sequence[Block]) -> None:
        """What was read of these blocks before this call was whole; GenerationChanged when one of them has been replaced."""
        self._progress.fence()
        for block in blocks:
            if self._load(block.slot, SEAL) != block.seal:
                raise gone(block)

    def retake(self, block: Block, owner: int) -> None:
        """Begin to change a finished block whose claim the owner has: it counts no more."""
        self.invalidate(block)
        self._table[block.slot, OWNER] = owner

    def invalidate(self, block: Block) -> None:
        """Make a finished block count no more; the caller has its claim."""
        self._memory.store(self._at(block.slot, SEAL), 0)
        self._progress.fence()

    def release(self, slot: int, owner: int) -> None:
        """Give a claim back."""
        self._memory.swap(self._at(slot, CLAIM), rounds.claim_of(owner), 0)

    def sweep(self, owner: int) -> int:
        """Give back all claims of an owner that is dead, or has not begun; how many there were."""
        held = np.flatnonzero(self._table[:, CLAIM] == rounds.claim_of(owner))
        return sum(
            self._memory.swap(self._at(int(slot), CLAIM), rounds.claim_of(owner), 0)
            for slot in held
        )

    def _try_claim(self, slot: int, is_needed: bool, owner: int) -> bool:
        claim, seal = self._load(slot, CLAIM), self._load(slot, SEAL)
        if not rounds.is_claimable(claim, seal, is_needed):
            return False
        return self._memory.swap(self._at(slot, CLAIM), 0, rounds.claim_of(owner))

    def _invalidate(self, slot: int, round: Round, node: Node, owner: int) -> None:
        self._memory.store(self._at(slot, SEAL), 0)
        self._progress.fence()
        round_of = round.version, round.step, round.part
        _CLAIMED.pack_into(self._bytes, self._at(slot, VERSION), *round_of, *node, owner)

    def _of_round(self, round: Round) -> list[int]:
        key = [round.version, round.step, round.part]
        rows = self._table[:, VERSION : PART + 1].tolist()
        return [slot for slot, row in enumerate(rows) if row == key]

    def _read(self, slot: int, round: Round) -> Block | None:
        seal = self._load(slot, SEAL)
        if seal == 0:
            return None
        *place, owner = _WRITTEN.unpack_from(self._bytes, self._at(slot, FIRST))
        node = Node(*place)
        # A header that is being changed does not agree with its seal.
        return Block(slot, node, seal, owner) if rounds.seal_of(round, node) == seal else None

    def _load(self, slot: int, word: int) -> int:
        return self._memory.load(self._at(slot, word))

    def _at(self, slot: int, word: int) -> int:
        return self._start + slot * self._stride + 8 * word


def gone(block: Block) -> GenerationChanged:
    """The error of a block that was overwritten while somebody read it: only a new generation does that."""
    return GenerationChanged(
        f"the block of lanes {block.node.first} to {block.node.stop - 1} in slot {block.slot} "
        "was replaced while it was read",
        fix="enter the new generation and begin the step again",
    )
