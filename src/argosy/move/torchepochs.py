"""Epochs of a segment without native code: what native/collectives.c does in `say`, `meet` and `compare`, with futexes from Python.

Made by torchroute.py, one per group; torchcopies.py works in it too. In an epoch a rank writes its slot of this parity and reads slots of the
other one; a meeting of all ranks ends it. Every wait is bounded: a dead peer, a deadline or somebody's abort ends it with an error.
Only the root of a scatter writes into slots of others, the first `stage_bytes` of each; after the last meeting of a call a rank may still use
the end of its own slot, and no more of it.
"""

from __future__ import annotations

import struct
import time

import torch

from argosy.errors import PeerLost, TimedOut
from argosy.move import verdicts, waits
from argosy.move.calls import Call
from argosy.move.segment import ARRIVED, BROKEN, GENERATION, MAX_RANKS, SAID, stage_bytes
from argosy.native import loader

ALIGNMENT = 64
SIZES_BYTES = 16 * MAX_RANKS
"""At the end of a slot in an all-to-all: what a rank sends to each other one and takes from it."""
_SAID = struct.Struct("<QQdQ")


class Step:
    """A call that is under way, and until when. Holds no view of the memory: a kept traceback would keep the mapping."""

    def __init__(self, call: Call, timeout_seconds: float) -> None:
        self.call = call
        self.deadline = time.monotonic() + timeout_seconds


class Epochs:
    """One process's side of a segment."""

    def __init__(self, place: verdicts.Place, pidfds: list[int], *, spin_seconds: float) -> None:
        self.place = place
        segment = place.segment
        self.size, self.rank = len(place.ranks), place.index
        self.stage_bytes = stage_bytes(segment.slot_bytes, self.size)
        self.share_bytes = self.stage_bytes // self.size // ALIGNMENT * ALIGNMENT
        """Of a slot in which every rank has a part."""
        self.slot_bytes = segment.slot_bytes
        messages_bytes = segment.slot_bytes - SIZES_BYTES
        self.message_bytes = messages_bytes // max(1, self.size - 1) // ALIGNMENT * ALIGNMENT
        """Of a slot with a message for every other rank, and the sizes of all of them."""
        self.slots = [
            [segment.slot(rank, parity) for rank in range(self.size)] for parity in range(2)
        ]
        self._addresses = [[slot.data_ptr() for slot in row] for row in self.slots]
        self._epoch, self._calls = 0, 0
        self._words = [
            segment.address + segment.rank_page(rank) + ARRIVED for rank in range(self.size)
        ]
        self._generation = segment.address + GENERATION
        self._peers = waits.Peers(
            pidfds, broken=segment.address + BROKEN, spin_seconds=spin_seconds
        )

    def begin(self, call: Call, timeout_seconds: float) -> Step:
        """Say what this rank calls; what a broken group raises."""
        segment = self.place.segment
        if segment.word(BROKEN):
            verdicts.raise_for(loader.BROKEN, -1, call, self.place)
        self._calls += 1
        at = segment.rank_page(self.rank) + SAID + 32 * (self._epoch & 1)
        said = _SAID.pack(call.what(), call.count, call.factor, self._calls)
        segment.memory[at : at + 32] = said
        return Step(call, timeout_seconds)

    def meet(self, step: Step, *, is_first: bool) -> None:
        """End the epoch: what all ranks wrote in it can be read now."""
        self._epoch = self._epoch + 1 & 0xFFFF_FFFF
        waits.post(self._words[self.rank], self._epoch)
        # Nobody sleeps on that word, but to post is a fence: of two who arrive at once the later one sees both. It may be that both do, and tell
        # the same epoch: the next one cannot end before they have.
        if self._first_missing() < 0:
            waits.post(self._generation, self._epoch)
        else:
            self._wait(step)
        if is_first:
            self._compare(step.call)

    def abort(self) -> None:
        """Make every rank leave what it waits for."""
        self._break_off(self.rank, verdicts.ABORTED)

    def close(self) -> None:
        """Let go of the segment's memory."""
        self.slots = []

    # --- where things lie ---------------------------------------------------------------------

    def mine(self) -> torch.Tensor:
        """This epoch's own slot."""
        return self.slots[self._epoch & 1][self.rank]

    def theirs(self, rank: int) -> torch.Tensor:
        """A rank's slot of the epoch before."""
        return self.slots[self._epoch - 1 & 1][rank]

    def address_now(self, rank: int) -> int:
        """Of a rank's slot of this epoch."""
        return self._addresses[self._epoch & 1][rank]

    def address_before(self, rank: int) -> int:
        """Of a rank's slot of the epoch before."""
        return self._addresses[self._epoch - 1 & 1][rank]

    # --- waits --------------------------------------------------------------------------------

    def _wait(self, step: Step) -> None:
        try:
            waits.wait(self._generation, self._epoch, peers=self._peers, deadline=step.deadline)
        except PeerLost as lost:
            self._break_off(lost.rank, loader.PEER_LOST)
        except TimedOut:
            self._break_off(self._first_missing(), loader.TIMEOUT)
        else:
            return
        verdicts.raise_for(loader.BROKEN, -1, step.call, self.place)

    def _first_missing(self) -> int:
        """The first rank that has not arrived, or -1."""
        for rank, word in enumerate(self._words):
            if (waits.peek(word) - self._epoch) & 0xFFFF_FFFF >= 0x8000_0000:
                return rank
        return -1

    def _break_off(self, rank: int, reason: int) -> None:
        """The first reason stays."""
        waits.break_off(self._peers, rank, reason)
        waits.wake(self._generation)

    def _compare(self, call: Call) -> None:
        # No view of the memory may stay in this frame: a kept traceback would keep the mapping.
        segment, parity = self.place.segment, 32 * (self._epoch - 1 & 1)
        said = [
            segment.read(segment.rank_page(rank) + SAID + parity, 24) for rank in range(self.size)
        ]
        for rank, words in enumerate(said):
            if words != said[self.rank]:
                verdicts.raise_for(loader.MISMATCH, rank, call, self.place)
