"""The exchange of a training step inside a host: gradient blocks in shared slots, ordered sums, votes, and the flip of a version.

Ranks that map the same arena publish blocks of lanes, add pages in the order of the canonical tree from whatever blocks cover the lanes,
and commit a new version of the state (versions.py). Nobody sends anything; every wait is bounded and ends with PeerLost when a watched
rank has ended. A process that dies leaves finished blocks, votes and pages valid; what it began is begun again by others.
Called by the trainer; decides nothing about who computes what.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from argosy.errors import (
    ClusterError,
    ConfigError,
    GenerationChanged,
    MismatchError,
    NoRoom,
    RoundOver,
    TimedOut,
)
from argosy.move import arenas, counters, kernels, rounds, trees
from argosy.move.broker import Scope
from argosy.move.directory import locked
from argosy.move.gathered import (
    Gathered,
    add_pages,
    add_slots,
    contents_of,
    gather,
    values_of,
)
from argosy.move.headers import Block, Headers
from argosy.move.layout import Layout
from argosy.move.rounds import NONE, Round
from argosy.move.trees import Node
from argosy.move.versions import Versions
from argosy.move.words import Memory, Places, Progress
from argosy.native import loader

REGION = "exchange"
_NATIVE, _WITHOUT_NATIVE = 1, 2


def open(name: str, layout: Layout, *, scope: Scope = "run", prefault: bool = True) -> Exchange:
    """Map the exchange of that name, making it if this is the first process; MismatchError when its layout is another one."""
    size = layout.places.total
    try:
        arena = arenas.create(name, size, scope=scope, prefault=prefault)
    except ClusterError:
        _refuse_other_size(name, size)
        raise
    if arena.find(REGION) is None:
        try:
            arena.empty((size,), torch.uint8, name=REGION)
        except ConfigError:
            pass  # another process was first
    return _opened(arena, layout)


def attach(descriptor: int, layout: Layout, *, prefault: bool = True) -> Exchange:
    """Map an exchange whose `fileno()` a peer has handed over, outside a run; the descriptor belongs to it, also when this fails."""
    return _opened(arenas.attach(descriptor, prefault=prefault), layout)


def _opened(arena: arenas.Arena, layout: Layout) -> Exchange:
    try:
        return Exchange(arena, layout)
    except BaseException:
        arena.close()
        raise


class SlotClaim:
    """A slot that this process writes one block to."""

    def __init__(self, exchange: Exchange, slot: int, round: Round, node: Node) -> None:
        self._exchange = exchange
        self.generation = exchange.generation
        self.slot = slot
        self.round = round
        self.node = node
        self.is_open = True

    @property
    def flat(self) -> torch.Tensor:
        """The whole gradient space, as float32."""
        return self._exchange.slot(self.slot)

    def gradient(self, name: str) -> torch.Tensor:
        """The elements of one parameter, flat, in their own dtype."""
        return values_of(self.flat, self._exchange.layout, name)

    def zero(self) -> None:
        """Set all gradients to zero; before the first lane of the block."""
        self.flat.zero_()

    def release(self) -> None:
        """Give the slot back without a block."""
        if self.is_open:
            self.is_open = False
            self._exchange.give_back(self)


class Exchange:
    """One process's part in the exchange; not for several threads at once."""

    def __init__(self, arena: arenas.Arena, layout: Layout) -> None:
        self.layout = layout
        self._arena = arena
        region = arena.tensor(REGION)
        if region.numel() != layout.places.total:
            raise _other_layout(arena.name)
        self._memory = Memory(region, arena.fileno())
        self._agree_on_layout()
        self._progress = Progress(self._memory, layout.places.progress)
        self._headers = Headers(self._memory, self._progress, layout)
        self.state = Versions(self._memory, self._progress, layout)
        """The versions of the state: begin, mark_done, wait_flip, pin, …"""
        self._slots = [self._map_slot(region, slot) for slot in range(layout.slots)]
        self._used: list[int] = []
        # A rank adds the same pages in every step.
        self._bounds_of = functools.lru_cache(maxsize=64)(layout.bounds_of)
        self._votes = self._memory.numbers(layout.places.vote_rounds, layout.num_pages)
        self._vote_values = self._memory.numbers(layout.places.vote_values, layout.num_pages)
        self.rank = NONE
        self.generation = NONE
        self._has_entered = False
        self._members: tuple[int, ...] = ()
        self._counts = {"blocks": 0, "pages": 0, "read_bytes": 0, "merges": 0}

    # --- membership ---------------------------------------------------------------------------

    @property
    def interrupt(self) -> Callable[[], None] | None:
        """Called whenever a wait looks at its condition in vain, at least every 50 ms; ends the wait by raising."""
        return self._progress.interrupt

    @interrupt.setter
    def interrupt(self, callback: Callable[[], None] | None) -> None:
        self._progress.interrupt = callback

    def wake(self) -> None:
        """Let all who wait look again; from any thread."""
        self._progress.tell()

    def wait_progress(self, *, deadline: float) -> None:
        """Sleep until anything happens in the exchange, at most until the next look; TimedOut at the deadline."""
        self._progress.sleep(deadline)

    def wait_for(self, condition: Callable[[], bool], what: str, *, deadline: float) -> None:
        """Wait until something of the caller's own holds, which others bring about and tell by `wake()`; TimedOut says `what` is missing."""
        self._progress.wait(condition, deadline, lambda: TimedOut(what))

    def enter(
        self, generation: int, rank: int, members: Mapping[int, int], *, deadline: float
    ) -> None:
        """Take part in a generation as `rank`, and wait until all its members have entered it.

        `members` are ranks with their process descriptors (-1 for this process). Every process that left an earlier generation has been reaped
        by now: what it had begun is given back. When this returns nobody works for an earlier generation any more.
        """
        if rank not in members or not all(0 <= r < self.layout.most_ranks for r in members):
            raise ConfigError(
                f"rank {rank} with members {sorted(members)} of at most {self.layout.most_ranks}",
                fix="name all members, this rank too, within most_ranks",
            )
        at, word = self._entered_at(rank), rounds.entered_word(generation)
        known = self._memory.load(at)
        # Whoever has this rank in a newer generation must not lose its word to one that comes late to an older.
        is_past = known > word or (self.rank == NONE and known == word)
        if is_past or not self._memory.swap(at, known, word):
            raise GenerationChanged(
                f"another process of rank {rank} has entered generation {generation} or a newer one already",
                fix="a replacement enters the generation that was made for it",
            )
        self.rank = self.state.owner = rank
        self.generation = generation
        self._members = tuple(members)
        self._progress.watch(members)
        self._progress.tell()
        self._progress.wait(
            lambda: self._all_entered(generation, members),
            deadline,
            lambda: self._not_entered(generation, members),
        )
        # Only now: until here a member may have written to a slot under the number that it had before, perhaps this one's.
        for owner in range(self.layout.most_ranks):
            if owner not in members or owner == rank:
                self._headers.sweep(owner)
            # Pins under this process's own number are a dead predecessor's when it enters for the first time.
            if owner not in members or (owner == rank and not self._has_entered):
                self.state.sweep(owner)
        self._has_entered = True

    def observe(self, number: int) -> None:
        """Take part as an observer that only reads and pins, such as a writer of checkpoints; an earlier one of this number is dead."""
        if not 0 <= number < self.layout.num_observers:
            raise ConfigError(f"observer {number} of {self.layout.num_observers}")
        self.state.owner = self.layout.most_ranks + number
        self.state.sweep(self.state.owner)

    def sweep_observer(self, number: int) -> int:
        """Give back the pins of an observer that is dead; how many there were."""
        held = self.state.sweep(self.layout.most_ranks + number)
        self._progress.tell()
        return held

    # --- blocks -------------------------------------------------------------------------------

    def claim(self, round: Round, node: Node) -> SlotClaim | None:
        """A slot for the block of these lanes; None when finished blocks have all of them already, RoundOver when nobody needs them."""
        self._check_member()
        trees.parent_of(node, self.layout.num_lanes)
        while True:
            blocks = self._headers.blocks(round)
            if blocks and self._is_finished(blocks, node):
                return None
            # Asked last: in a round that was not over yet, what looked missing was missing, and the round waits for us.
            self._refuse_if_over(round)
            slot = self._headers.claim(round, node, self.rank, preferred=self._used, seen=blocks)
            if slot is not None:
                break
            if not self._make_room(round):
                raise NoRoom(
                    f"no slot for lanes {node.first} to {node.stop - 1} of {round}: "
                    f"all {self.layout.slots} hold blocks that are needed",
                    fix="make the layout with more num_slots",
                )
        if slot not in self._used:
            self._used.append(slot)
        return SlotClaim(self, slot, round, node)

    def publish(
        self,
        claim: SlotClaim,
        *,
        touched: Sequence[str] | frozenset[str] | None = None,
        terms: dict[str, tuple[float, float]] | None = None,
        extra: bytes = b"",
    ) -> Block:
        """The block is finished: from now on it counts, whatever happens to this process.

        `touched`: parameters that got a gradient (all, if None); `terms`: (sum, count) by name.
        """
        contents = contents_of(self.layout, touched, terms, extra)
        if not claim.is_open:
            raise ConfigError(
                f"the claim of lanes {claim.node.first} to {claim.node.stop - 1} was published or released before",
                fix="publish each claim once",
            )
        if claim.generation != self.generation:
            raise GenerationChanged(
                f"the claim of lanes {claim.node.first} to {claim.node.stop - 1} is of generation "
                f"{claim.generation}, this is {self.generation}",
                fix="claim the lanes again",
            )
        claim.is_open = False
        block = self._headers.finish(claim.slot, claim.round, claim.node, contents)
        self._counts["blocks"] += 1
        self._tell_of_block(claim.round)
        return block

    def give_back(self, claim: SlotClaim) -> None:
        """Release a claim without a block."""
        if claim.generation == self.generation:
            self._headers.release(claim.slot, self.rank)

    def published(self, round: Round) -> list[Block]:
        """The finished blocks of a round that nobody else's contain, in lane order."""
        return self._headers.cover(round)

    def missing(self, round: Round) -> list[int]:
        """The lanes of a round that no finished block has."""
        nodes = [block.node for block in self._headers.blocks(round)]
        return trees.missing(nodes, self.layout.num_lanes)

    def writers(self, round: Round) -> list[int]:
        """The ranks that are writing blocks of a round."""
        return sorted({owner for owner, _ in self._headers.claims(round)})

    def wait_lanes(
        self, round: Round, *, deadline: float, owners: Sequence[int] | None = None
    ) -> Gathered:
        """Wait until finished blocks have all lanes. `owners` (a rank per lane) are named when the wait ends in vain."""
        found: list[Gathered] = []

        def is_complete() -> bool:
            found[:] = self._try_gather(round) if self._headers.may_cover(round) else []
            if not found:
                self._refuse_if_over(round)
            return bool(found)

        self._progress.wait(is_complete, deadline, lambda: self._no_lanes(round, owners))
        return found[0]

    def wait_read(self, round: Round, *, deadline: float) -> None:
        """After a round without an update: wait until every member has what it needs of the blocks, whose slots are then free."""
        self._check_member()
        tag = rounds.read_tag(round, self.generation)
        self._memory.store(self._entered_at(self.rank) + 8, tag)
        self._progress.tell()

        def late() -> list[int]:
            words = {rank: self._memory.load(self._entered_at(rank) + 8) for rank in self._members}
            return [rank for rank, word in words.items() if word < tag]

        self._progress.wait(
            lambda: not late(),
            deadline,
            lambda: TimedOut(f"{round}: ranks {late()} have not read the blocks"),
        )

    # --- sums and votes -----------------------------------------------------------------------

    def reduce(self, gathered: Gathered, pages: Sequence[int], out: torch.Tensor) -> list[float]:
        """Add these pages over all lanes into the same places of `out`, a flat float32 tensor; the sums of squares, by page.

        Reads each block once. A sum that is infinite or NaN says that the page has such an element. GenerationChanged when blocks
        were overwritten meanwhile by a new generation that begins the step again; RoundOver when the others, who need no page of this rank, have gone on.
        """
        self._check_out(out)
        while True:
            partials = self._add(gathered, pages, out)
            try:
                self._headers.check(gathered.blocks)
                return partials
            except GenerationChanged:
                # Two of them may have been added into one to make room for a block that somebody computed twice.
                again = self._try_gather(gathered.round)
                if not again:
                    self._refuse_if_over(gathered.round)
                    raise
                gathered = again[0]

    def _add(self, gathered: Gathered, pages: Sequence[int], out: torch.Tensor) -> list[float]:
        inputs = [self._slots[block.slot] for block in gathered.blocks]
        bounds = self._bounds_of(tuple(pages))
        if self.layout.double_pages:
            doubles = [page in self.layout.double_pages for page in pages]
            partials = add_pages(out, inputs, gathered.program, bounds, doubles)
        else:
            partials = kernels.reduce_pages(out, inputs, gathered.program, bounds)
        read_bytes = 4 * sum(stop - start for start, stop in bounds) * len(inputs)
        self._counts["read_bytes"] += read_bytes
        counters.own.shared_memory_bytes += read_bytes
        counters.own.shared_memory_calls += 1
        self._counts["pages"] += len(pages)
        return partials

    def vote(self, round: Round, pages: Sequence[int], partials: Sequence[float]) -> None:
        """Say what these pages add to the global norm; a page that is not finite votes with that."""
        if len(pages) != len(partials):
            raise ConfigError(
                f"{len(partials)} votes for {len(pages)} pages", fix="vote with what reduce() gave"
            )
        places = np.asarray(pages, dtype=np.int64)
        values = np.asarray(partials, dtype=np.float64).view(np.uint64)
        self._memory.store_all(self._vote_values, places, values)
        # They count from here on, each as soon as its word is the whole tag.
        self._memory.store_all(self._votes, places, np.uint64(round.tag))
        self._progress.fence()
        if not len(self._unvoted(round)):
            self._progress.tell()  # of two who vote at once the later one sees both

    def unvoted(self, round: Round) -> list[int]:
        """The pages of the round whose vote is missing."""
        found: list[int] = self._unvoted(round).tolist()
        return found

    def _unvoted(self, round: Round) -> Places:
        pages = self.state.pages_of(round)
        missing: Places = pages[self._votes[pages] != np.uint64(round.tag)]
        return missing

    def wait_votes(self, round: Round, *, deadline: float) -> list[float]:
        """The votes of all pages of the round, in page order: the wait for the global norm is the vote."""

        def is_voted() -> bool:
            if not len(self._unvoted(round)):
                return True
            self._refuse_if_over(round)
            return False

        self._progress.wait(is_voted, deadline, lambda: self._no_votes(round))
        self._progress.fence()
        found: list[float] = self._vote_values.view(np.float64)[self.state.pages_of(round)].tolist()
        # Nobody waits for a rank without lanes and pages: what it has read may be votes of the next round.
        self._progress.fence()
        self._refuse_if_over(round)
        return found

    def is_over(self, round: Round) -> bool:
        """Whether others have finished the round: its version is past, or all its pages are done."""
        return self.state.is_over(round)

    # --- the rest -----------------------------------------------------------------------------

    def slot(self, number: int) -> torch.Tensor:
        """The gradient space of a slot."""
        return self._slots[number]

    def fileno(self) -> int:
        """The descriptor of its memory: with `attach`, how processes that no keeper serves share an exchange."""
        return self._arena.fileno()

    def statistics(self) -> dict[str, float]:
        """Counts of this process, for telemetry."""
        return {
            **self._counts,
            "waits": self._progress.num_waits,
            "waited_seconds": self._progress.waited_seconds,
            "slots_used": len(self._used),
        }

    def close(self) -> None:
        """Give up the claims of this process and the mapping; views of slots keep their memory."""
        if self.rank != NONE:
            self._headers.sweep(self.rank)
        if self.state.owner != NONE:
            self.state.sweep(self.state.owner)
        self._arena.close()

    def _is_finished(self, blocks: Sequence[Block], node: Node) -> bool:
        missing = trees.missing([block.node for block in blocks], node.stop)
        return all(lane < node.first for lane in missing)

    def _try_gather(self, round: Round) -> list[Gathered]:
        """What covers all lanes, as a list of one, or an empty list."""
        blocks = self._headers.cover(round)
        if sum(block.node.size for block in blocks) != self.layout.num_lanes:
            return []
        try:
            contents = self._headers.contents(blocks)
        except GenerationChanged:
            return []
        return [gather(round, blocks, contents, self.layout)]

    def _tell_of_block(self, round: Round) -> None:
        """Wake those who wait when all lanes may be there, or when a sibling is all that those can wait for who have no room.

        Of two who finish at once the later one sees both blocks. To wake for every block would cost a switch of processes each, where there are more ranks
        than cores.
        """
        self._progress.fence()
        if self._headers.may_cover(round) or self._headers.is_full(round):
            self._progress.tell()

    def _make_room(self, round: Round) -> bool:
        """Add two finished siblings into one slot, so that the other is free; False when there are none.

        Only called while lanes are missing: nobody can be adding up all of them then. Extra bytes belong to one block and cannot be added.
        """
        if self.layout.extra_bytes:
            return False
        blocks = {block.node: block for block in self._headers.blocks(round)}
        for node, left in blocks.items():
            parent = trees.parent_of(node, self.layout.num_lanes)
            if parent.size < 2 or parent == node:
                continue
            first, second = trees.halves(parent)
            if node == first and second in blocks and self._merge(round, left, blocks[second]):
                self._progress.tell()  # there is room, and lanes that were looked at meanwhile seemed to be missing
                return True
        return False

    def _merge(self, round: Round, left: Block, right: Block) -> bool:
        headers = self._headers
        if not headers.claim_block(left, self.rank):
            return False
        if not headers.claim_block(right, self.rank):
            headers.release(left.slot, self.rank)
            return False
        first, second = headers.contents([left, right])
        contents = first.plus(second)
        headers.retake(left, self.rank)
        add_slots(self._slots[left.slot], self._slots[right.slot], self.layout)
        parent = trees.parent_of(left.node, self.layout.num_lanes)
        headers.finish(left.slot, round, parent, contents)
        headers.invalidate(right)
        headers.release(right.slot, self.rank)
        self._counts["merges"] += 1
        return True

    def _map_slot(self, region: torch.Tensor, slot: int) -> torch.Tensor:
        places = self.layout.places
        start = places.slots + slot * places.slot_bytes
        return region[start : start + 4 * self.layout.num_elements].view(torch.float32)

    def _agree_on_layout(self) -> None:
        """The first process says what it shares; all others must have the same layout, and swap words in the same way."""
        at = self.layout.places.digest
        path = _WITHOUT_NATIVE if loader.quick() is None else _NATIVE
        # Under the lock, since swaps of the two paths do not see each other.
        with locked(self._arena.fileno()):
            for offset, word in ((at, self.layout.digest), (at + 8, path)):
                if self._memory.load(offset) == 0:
                    self._memory.store(offset, word)
            digest, theirs = self._memory.load(at), self._memory.load(at + 8)
        if digest != self.layout.digest:
            raise _other_layout(self._arena.name)
        if theirs != path:
            has, have = ("has no", "with") if theirs == _NATIVE else ("has", "without")
            raise MismatchError(
                f"exchange {self._arena.name!r} is used {have} native code, this process {has} native code",
                fix="start all ranks from one installation, with the same ARGOSY_NATIVE (`argosy doctor` tells the path)",
            )

    def _entered_at(self, rank: int) -> int:
        return self.layout.places.entered + 64 * rank

    def _all_entered(self, generation: int, members: Mapping[int, int]) -> bool:
        entered = [self._memory.load(self._entered_at(rank)) for rank in members]
        found = rounds.entry(entered, generation)
        if found == "past":
            raise GenerationChanged(
                f"generation {max(entered) - 1} has begun, this process enters {generation}",
                fix="ask for the current generation and enter that",
            )
        return found == "all"

    def late(self, generation: int, members: Iterable[int]) -> list[int]:
        """The members that have not entered a generation."""
        word = rounds.entered_word(generation)
        return [r for r in members if self._memory.load(self._entered_at(r)) != word]

    def _not_entered(self, generation: int, members: Mapping[int, int]) -> TimedOut:
        return TimedOut(
            f"ranks {self.late(generation, members)} have not entered generation {generation}",
            fix="they are slow or gone: `argosy stacks`",
        )

    def _check_member(self) -> None:
        if self.rank == NONE:
            raise ConfigError("this process is in no generation yet", fix="call enter() first")

    def _check_out(self, out: torch.Tensor) -> None:
        size = self.layout.num_elements
        if out.dtype != torch.float32 or out.dim() != 1 or out.numel() != size:
            raise ConfigError(
                f"out is {out.dtype} of {tuple(out.shape)}",
                fix=f"give a flat float32 tensor of {size} elements",
            )

    def _no_lanes(self, round: Round, owners: Sequence[int] | None) -> TimedOut:
        missing = self.missing(round)
        writing = {
            lane: owner
            for owner, node in self._headers.claims(round)
            for lane in range(node.first, node.stop)
        }
        told = []
        for lane in missing[:8]:
            if lane in writing:
                told.append(f"{lane} (rank {writing[lane]} is writing it)")
            elif owners is not None:
                told.append(f"{lane} (of rank {owners[lane]})")
            else:
                told.append(f"{lane} (nobody is writing it)")
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        return TimedOut(
            f"{round}: lanes {', '.join(told)}{more} are missing",
            fix="their owners are slow or gone: `argosy stacks`",
        )

    def _no_votes(self, round: Round) -> TimedOut:
        missing = self.unvoted(round)
        return TimedOut(
            f"{round}: the votes of {len(missing)} pages are missing, the first is {missing[:1]}",
            fix="their owners are slow or gone: `argosy stacks`",
        )

    def _refuse_if_over(self, round: Round) -> None:
        if self.is_over(round):
            raise RoundOver(
                f"{round} was finished by others", fix="go on from the committed version"
            )


def _refuse_other_size(name: str, size: int) -> None:
    """MismatchError when the name is taken by an exchange of another size."""
    with arenas.open(name, prefault=False) as found:
        entry = found.find(REGION)
    if entry is not None and entry.num_bytes != size:
        raise _other_layout(name)


def _other_layout(name: str) -> MismatchError:
    return MismatchError(
        f"exchange {name!r} exists with another layout (lanes, ranks, parameters or terms differ)",
        fix="give every process the same model and lanes, or use another name",
    )
