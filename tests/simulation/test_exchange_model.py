"""All interleavings of a small exchange, with a crash at every point: no torn version, one flip per version, the same bits, no deadlock.

The model's processes are explicit programs over shared words, one access per transition; every decision (what may be claimed, what
covers the lanes, where the next version goes, when it flips) is taken by the functions that the real exchange uses. Values are names of what they should be: a
sum in another order, of other weights or of half-written pages is BAD, and stays so. tests/parts/move/test_exchange.py holds the real code to the same order
of accesses.
"""

from typing import NamedTuple

import pytest

from argosy.move import rounds, trees
from argosy.move.layout import Layout, Parameter
from argosy.move.rounds import NONE, Pin, State
from argosy.move.trees import Node

BAD = "bad"
TORN = "torn"


class Instance(NamedTuple):
    """What is explored."""

    ranks: int = 2
    lanes: int = 2
    pages: int = 2
    steps: int = 2
    parts: int = 1
    crashes: int = 1
    has_replacement: bool = False
    observers: int = 0
    versions: int = 2
    num_slots: int = 0
    mutant: str = ""

    def pages_of_part(self, part):
        return [page for page in range(self.pages) if page % self.parts == part]

    @property
    def slots(self):
        if self.num_slots:
            return self.num_slots
        parameters = (Parameter(name="w", numel=1),)
        return Layout(num_lanes=self.lanes, most_ranks=self.ranks, parameters=parameters).slots


class Slot(NamedTuple):
    """A gradient slot: who writes to it, what its seal says, the values of its pages."""

    claim: int = 0
    seal: int = 0
    data: tuple = ()


class World(NamedTuple):
    """The shared memory, and what the keeper knows."""

    slots: tuple
    votes: tuple
    state: int
    versions: tuple
    done: tuple
    weights: tuple
    refreshed: tuple
    entered: tuple
    pins: tuple
    generation: int
    members: tuple
    flips: tuple
    crashes: int
    ranks: tuple


class Rank(NamedTuple):
    """A process: where it stands, and what it remembers."""

    phase: str = "enter"
    generation: int = 0
    version: int = 0
    part: int = 0
    index: int = 0
    page: int = 0
    slot: int = -1
    members: tuple = ()
    cover: tuple = ()
    sums: tuple = ()


class Violation(AssertionError):
    pass


def put(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


class Model:
    """One instance: its first state, its transitions, its invariants."""

    def __init__(self, instance):
        self.it = instance
        self.root = Node(0, instance.lanes)
        # Seals are odd 64-bit numbers; the model needs the way back.
        self.sealed = {
            rounds.seal_of(self.round_of(version, part), node): (version, part, node)
            for version in range(instance.steps)
            for part in range(instance.parts)
            for node in self.all_nodes()
        }

    def all_nodes(self):
        return {
            node
            for first in range(self.it.lanes)
            for count in range(1, self.it.lanes - first + 1)
            for node in trees.nodes_of(first, count, self.it.lanes)
        }

    @staticmethod
    def round_of(version, part):
        return rounds.Round(version, version, part)

    def first(self):
        it = self.it
        members = tuple(range(it.ranks))
        observers = (Rank(phase="pin"),) * it.observers
        return World(
            slots=(Slot(data=("",) * it.pages),) * it.slots,
            votes=(("", ""),) * it.pages,
            state=0,
            versions=((("s", 0),) * it.pages,) + ((TORN,) * it.pages,) * (it.versions - 1),
            done=(0,) * it.pages,
            weights=(TORN,) * it.pages,
            refreshed=(0,) * it.pages,
            entered=(0,) * it.ranks,
            pins=(0,) * it.versions,
            generation=0,
            members=members,
            flips=(),
            crashes=0,
            ranks=tuple(Rank(members=members) for _ in members) + observers,
        )

    # --- transitions --------------------------------------------------------------------------

    def successors(self, world):
        """(label, next) of every enabled transition; crashes come last."""
        found = []
        for number, rank in enumerate(world.ranks):
            if rank.phase in ("dead", "gone"):
                continue
            after = getattr(self, "do_" + rank.phase)(world, number, rank)
            if after is None and number < self.it.ranks and world.generation > rank.generation:
                # Waits end with PeerLost, and the keeper has a new generation by then.
                fresh = Rank(generation=world.generation, members=world.members)
                is_member = number in world.members
                after = self.goto(world, number, fresh if is_member else Rank(phase="gone"))
            if after is not None:
                found.append((f"{number} {rank.phase}", after))
        found += self.reaped(world)
        if world.crashes < self.it.crashes:
            for number in range(self.it.ranks):
                if world.ranks[number].phase not in ("dead", "gone"):
                    found.append((f"{number} dies", self.killed(world, number)))
        return found

    def killed(self, world, number):
        if self.it.mutant == "not reaped":
            # It was only stopped: others go on without it, and it goes on too.
            members = tuple(n for n in world.members if n != number) or world.members
            return world._replace(
                crashes=world.crashes + 1, generation=world.generation + 1, members=members
            )
        dead = world.ranks[number]._replace(phase="dead")
        return world._replace(crashes=world.crashes + 1, ranks=put(world.ranks, number, dead))

    def reaped(self, world):
        dead = [n for n in range(self.it.ranks) if world.ranks[n].phase == "dead"]
        if not dead:
            return []
        if self.it.has_replacement:
            members = world.members
        else:
            members = tuple(n for n in world.members if n not in dead)
        if not members:
            return []
        ranks, generation = world.ranks, world.generation + 1
        for number in dead:
            fresh = Rank(generation=generation, members=members)
            ranks = put(ranks, number, fresh if number in members else Rank(phase="gone"))
        after = world._replace(generation=generation, members=members, ranks=ranks)
        return [(f"keeper reaps {dead}", after)]

    def goto(self, world, number, rank):
        return world._replace(ranks=put(world.ranks, number, rank))

    def do_enter(self, world, number, rank):
        entered = put(world.entered, number, rank.generation + 1)
        phase = "sweep" if self.it.mutant == "no barrier" else "meet"
        after = world._replace(entered=entered)
        return self.goto(after, number, rank._replace(phase=phase))

    def do_meet(self, world, number, rank):
        if any(world.entered[member] < rank.generation + 1 for member in rank.members):
            return None
        return self.goto(world, number, rank._replace(phase="sweep"))

    def do_sweep(self, world, number, rank):
        """Claims of the dead, and what this process had begun in an earlier generation."""
        slots = tuple(
            slot._replace(claim=0)
            if slot.claim and (slot.claim - 1 == number or slot.claim - 1 not in rank.members)
            else slot
            for slot in world.slots
        )
        return self.goto(world._replace(slots=slots), number, rank._replace(phase="look"))

    def do_look(self, world, number, rank):
        version = State.of(world.state).version
        fresh = Rank(generation=rank.generation, members=rank.members, version=version)
        return self.goto(world, number, fresh._replace(phase="refresh"))

    def own_pages(self, rank, number, part=None):
        pages = range(self.it.pages) if part is None else self.it.pages_of_part(part)
        position = rank.members.index(number)
        return [page for page in pages if page % len(rank.members) == position]

    def do_refresh(self, world, number, rank):
        pages = [
            page
            for page in self.own_pages(rank, number)
            if world.refreshed[page] < rank.version + 1
        ]
        if not pages:
            return self.goto(world, number, rank._replace(phase="open"))
        after = world._replace(weights=put(world.weights, pages[0], TORN))
        return self.goto(after, number, rank._replace(phase="refreshing", page=pages[0]))

    def do_refreshing(self, world, number, rank):
        slot = State.of(world.state).slot
        value = world.versions[slot][rank.page]
        whole = ("w", value[1]) if value[0] == "s" else BAD
        after = world._replace(weights=put(world.weights, rank.page, whole))
        return self.goto(after, number, rank._replace(phase="refreshed"))

    def do_refreshed(self, world, number, rank):
        words = put(world.refreshed, rank.page, rank.version + 1)
        return self.goto(world._replace(refreshed=words), number, rank._replace(phase="refresh"))

    def do_open(self, world, number, rank):
        if any(word < rank.version + 1 for word in world.refreshed):
            return None
        if rank.version >= self.it.steps:
            return self.goto(world, number, rank._replace(phase="finished"))
        return self.goto(world, number, rank._replace(phase="part"))

    def do_finished(self, world, number, rank):
        return None

    def do_part(self, world, number, rank):
        """A step's part whose pages are all done is over, whoever did them."""
        if rank.part == self.it.parts:
            return self.goto(world, number, rank._replace(phase="flip"))
        over = all(world.done[p] > rank.version for p in self.it.pages_of_part(rank.part))
        if over:
            return self.goto(world, number, rank._replace(part=rank.part + 1))
        return self.goto(world, number, rank._replace(phase="lanes", index=0))

    def own_blocks(self, rank, number):
        position, count = rank.members.index(number), len(rank.members)
        first, stop = (self.it.lanes * (position + i) // count for i in (0, 1))
        return trees.blocks_of(first, stop - first, self.it.lanes)

    def finished_blocks(self, world, rank):
        wanted = (rank.version, rank.part)
        found = {}
        for index, slot in enumerate(world.slots):
            version, part, node = self.sealed.get(slot.seal, (None, None, None))
            if (version, part) == wanted:
                found[node] = index
        return found

    def do_lanes(self, world, number, rank):
        blocks = self.own_blocks(rank, number)
        if rank.index == len(blocks):
            return self.goto(world, number, rank._replace(phase="gather"))
        node = blocks[rank.index]
        finished = self.finished_blocks(world, rank)
        missing = trees.missing(finished, self.it.lanes)
        if not any(node.first <= lane < node.stop for lane in missing):
            return self.goto(world, number, rank._replace(index=rank.index + 1))
        phase = "claim" if self.it.mutant == "claims late" else "ask"
        return self.goto(world, number, rank._replace(phase=phase))

    def is_over(self, world, rank):
        """Whether others have finished the round; then lanes that look missing are not."""
        done = [world.done[page] > rank.version for page in self.it.pages_of_part(rank.part)]
        return rounds.is_over(State.of(world.state), self.round_of(rank.version, rank.part), done)

    def do_ask(self, world, number, rank):
        phase = "look" if self.is_over(world, rank) else "claim"
        return self.goto(world, number, rank._replace(phase=phase))

    def do_claim(self, world, number, rank):
        node = self.own_blocks(rank, number)[rank.index]
        finished = self.finished_blocks(world, rank)
        needed = {finished[node] for node in trees.cover(finished, self.it.lanes)}
        for index, slot in enumerate(world.slots):
            is_needed = index in needed and self.it.mutant != "claims valid blocks"
            if rounds.is_claimable(slot.claim, slot.seal, is_needed):
                taken = slot._replace(claim=rounds.claim_of(number))
                after = world._replace(slots=put(world.slots, index, taken))
                phase = {"seal first": "seal", "no clear": "store"}.get(self.it.mutant, "clear")
                return self.goto(after, number, rank._replace(phase=phase, slot=index, page=0))
        if not self.siblings(finished):
            raise Violation(f"no slot for {node}")
        return self.goto(world, number, rank._replace(phase="merge"))

    def siblings(self, finished):
        """Two finished blocks whose sum is a node, with the slots they are in."""
        for left in finished:
            parent = trees.parent_of(left, self.it.lanes)
            if parent.size > 1 and parent != left:
                first, second = trees.halves(parent)
                if left == first and second in finished:
                    return (left, finished[left]), (second, finished[second])
        return None

    def do_merge(self, world, number, rank):
        """Make room: claim two siblings, then add the right one into the left one's slot."""
        pair = self.siblings(self.finished_blocks(world, rank))
        if pair is None or any(world.slots[slot].claim for _, slot in pair):
            return self.goto(world, number, rank._replace(phase="lanes"))
        slots = world.slots
        for _, slot in pair:
            slots = put(slots, slot, slots[slot]._replace(claim=rounds.claim_of(number)))
        phase = "add_left" if self.it.mutant == "no clear" else "clear_left"
        following = rank._replace(phase=phase, cover=pair, page=0)
        return self.goto(world._replace(slots=slots), number, following)

    def do_clear_left(self, world, number, rank):
        slot = rank.cover[0][1]
        cleared = world.slots[slot]._replace(seal=0)
        after = world._replace(slots=put(world.slots, slot, cleared))
        return self.goto(after, number, rank._replace(phase="add_left"))

    def do_add_left(self, world, number, rank):
        (_, left), (_, right) = rank.cover
        page = self.it.pages_of_part(rank.part)[rank.page]
        total = self.plus(world.slots[left].data[page], world.slots[right].data[page])
        slot = world.slots[left]._replace(data=put(world.slots[left].data, page, total))
        after = world._replace(slots=put(world.slots, left, slot))
        is_last = rank.page + 1 == len(self.it.pages_of_part(rank.part))
        phase = "seal_left" if is_last else "add_left"
        return self.goto(after, number, rank._replace(phase=phase, page=rank.page + 1))

    def do_seal_left(self, world, number, rank):
        node, left = rank.cover[0]
        parent = trees.parent_of(node, self.it.lanes)
        seal = rounds.seal_of(self.round_of(rank.version, rank.part), parent)
        slot = world.slots[left]._replace(seal=seal, claim=0)
        after = world._replace(slots=put(world.slots, left, slot))
        return self.goto(after, number, rank._replace(phase="free_right"))

    def do_free_right(self, world, number, rank):
        right = rank.cover[1][1]
        slot = world.slots[right]._replace(seal=0, claim=0)
        after = world._replace(slots=put(world.slots, right, slot))
        return self.goto(after, number, rank._replace(phase="lanes", cover=()))

    def do_clear(self, world, number, rank):
        slot = world.slots[rank.slot]._replace(seal=0)
        after = world._replace(slots=put(world.slots, rank.slot, slot))
        return self.goto(after, number, rank._replace(phase="store"))

    def do_store(self, world, number, rank):
        """The gradients of one page: right when all weights were whole and of this version."""
        node = self.own_blocks(rank, number)[rank.index]
        is_right = all(weight == ("w", rank.version) for weight in world.weights)
        value = (rank.version, rank.part, node) if is_right else BAD
        pages = self.it.pages_of_part(rank.part)
        slot = world.slots[rank.slot]
        slot = slot._replace(data=put(slot.data, pages[rank.page], value))
        after = world._replace(slots=put(world.slots, rank.slot, slot))
        is_last = rank.page + 1 == len(pages)
        phase = ("release" if self.it.mutant == "seal first" else "seal") if is_last else "store"
        return self.goto(after, number, rank._replace(phase=phase, page=rank.page + 1))

    def do_seal(self, world, number, rank):
        node = self.own_blocks(rank, number)[rank.index]
        seal = rounds.seal_of(self.round_of(rank.version, rank.part), node)
        slot = world.slots[rank.slot]._replace(seal=seal)
        after = world._replace(slots=put(world.slots, rank.slot, slot))
        phase = "store" if self.it.mutant == "seal first" else "release"
        return self.goto(after, number, rank._replace(phase=phase))

    def do_release(self, world, number, rank):
        slot = world.slots[rank.slot]
        assert slot.claim == rounds.claim_of(number)
        after = world._replace(slots=put(world.slots, rank.slot, slot._replace(claim=0)))
        following = rank._replace(phase="lanes", index=rank.index + 1, slot=-1)
        return self.goto(after, number, following)

    def do_gather(self, world, number, rank):
        finished = self.finished_blocks(world, rank)
        if trees.missing(finished, self.it.lanes):
            is_over = self.is_over(world, rank)
            return self.goto(world, number, rank._replace(phase="look")) if is_over else None
        chosen = trees.cover(finished, self.it.lanes)
        cover = tuple((node, finished[node]) for node in chosen)
        return self.goto(world, number, rank._replace(phase="add", cover=cover, index=0, sums=()))

    def do_add(self, world, number, rank):
        pages = self.own_pages(rank, number, rank.part)
        if rank.index == len(pages):
            return self.goto(world, number, rank._replace(phase="check"))
        values = [world.slots[slot].data[pages[rank.index]] for _, slot in rank.cover]
        program = trees.program([node for node, _ in rank.cover], self.it.lanes)
        total = trees.evaluate(program, values, self.plus)
        following = rank._replace(index=rank.index + 1, sums=(*rank.sums, total))
        return self.goto(world, number, following)

    def plus(self, left, right):
        if BAD in (left, right) or "" in (left, right) or left[:2] != right[:2]:
            return BAD
        parent = trees.parent_of(left[2], self.it.lanes)
        is_right = parent.size > 1 and trees.halves(parent) == (left[2], right[2])
        return (*left[:2], parent) if is_right else BAD

    def do_check(self, world, number, rank):
        seals = {self.sealed.get(world.slots[slot].seal) for _, slot in rank.cover}
        wanted = {(rank.version, rank.part, node) for node, _ in rank.cover}
        if seals != wanted and self.it.mutant != "no check":
            return self.goto(world, number, rank._replace(phase="gather"))
        return self.goto(world, number, rank._replace(phase="vote", index=0, cover=()))

    def do_vote(self, world, number, rank):
        pages = self.own_pages(rank, number, rank.part)
        if rank.index == len(pages):
            return self.goto(world, number, rank._replace(phase="count"))
        vote = ((rank.version, rank.part), rank.sums[rank.index])
        after = world._replace(votes=put(world.votes, pages[rank.index], vote))
        return self.goto(after, number, rank._replace(index=rank.index + 1))

    def do_count(self, world, number, rank):
        votes = [world.votes[page] for page in self.it.pages_of_part(rank.part)]
        if any(tag != (rank.version, rank.part) for tag, _ in votes):
            is_over = self.is_over(world, rank)
            return self.goto(world, number, rank._replace(phase="look")) if is_over else None
        return self.goto(world, number, rank._replace(phase="tally"))

    def do_tally(self, world, number, rank):
        """The values are read after the words that say whose they are: those of the next round may be there by now."""
        values = {world.votes[page][1] for page in self.it.pages_of_part(rank.part)}
        own = (rank.version, rank.part, self.root)
        norm = "norm" if values == {own} else BAD if values <= {own, BAD} else "another's"
        return self.goto(world, number, rank._replace(phase="judge", cover=(norm,)))

    def do_judge(self, world, number, rank):
        if self.is_over(world, rank) and self.it.mutant != "votes unchecked":
            return self.goto(world, number, rank._replace(phase="look", cover=()))
        if rank.cover == ("another's",):
            raise Violation(f"rank {number} judges by votes of another round")
        own = self.own_pages(rank, number, rank.part)
        is_needed = any(world.done[page] <= rank.version for page in own)
        phase = "begin" if is_needed else "update"
        return self.goto(world, number, rank._replace(phase=phase, index=0))

    def do_begin(self, world, number, rank):
        state = State.of(world.state)
        if state.version != rank.version:
            raise Violation(f"rank {number} begins version {rank.version + 1} after {state}")
        pinned = self.pinned(world) if self.it.mutant != "ignores pins" else ()
        after = rounds.begun(state, pinned, self.it.versions)
        if after is None:
            return None
        if self.it.mutant == "overwrites" and state.coming == rounds.NONE:
            after = state._replace(coming=state.slot)
        following = rank._replace(phase="update", slot=after.coming)
        return self.goto(world._replace(state=after.word), number, following)

    def do_update(self, world, number, rank):
        pages = self.own_pages(rank, number, rank.part)
        left = [page for page in pages if world.done[page] <= rank.version]
        if not left:
            is_last = rank.part + 1 == self.it.parts
            phase = "next" if is_last or self.it.mutant == "hurries on" else "settle"
            following = rank._replace(phase=phase, cover=(), sums=(), slot=-1)
            return self.goto(world, number, following)
        after = self.written(world, rank.slot, left[0], TORN)
        following = rank._replace(phase="write", page=left[0])
        return self.goto(after, number, following)

    def do_settle(self, world, number, rank):
        """The blocks of a part are needed until all its pages are done."""
        if not self.is_over(world, rank):
            return None
        return self.goto(world, number, rank._replace(phase="next"))

    def do_next(self, world, number, rank):
        return self.goto(world, number, rank._replace(phase="part", part=rank.part + 1))

    def written(self, world, slot, page, value):
        pages = put(world.versions[slot], page, value)
        return world._replace(versions=put(world.versions, slot, pages))

    def do_write(self, world, number, rank):
        total = rank.sums[self.own_pages(rank, number, rank.part).index(rank.page)]
        old = world.versions[State.of(world.state).slot][rank.page]
        is_right = (
            total == (rank.version, rank.part, self.root)
            and old == ("s", rank.version)
            and rank.cover == ("norm",)
        )
        value = ("s", rank.version + 1) if is_right else BAD
        after = self.written(world, rank.slot, rank.page, value)
        return self.goto(after, number, rank._replace(phase="done"))

    def do_done(self, world, number, rank):
        done = put(world.done, rank.page, rank.version + 1)
        return self.goto(world._replace(done=done), number, rank._replace(phase="update"))

    def do_flip(self, world, number, rank):
        state = State.of(world.state)
        if state.version > rank.version:
            return self.goto(world, number, rank._replace(phase="look"))
        done = [page for page, version in enumerate(world.done) if version > rank.version]
        if self.it.mutant == "flips early" and done:
            done = range(self.it.pages)
        after = rounds.flipped(state, rank.version + 1, done, self.it.pages)
        if after is None:
            return None
        flips = (*world.flips, after.version)
        world = world._replace(state=after.word, flips=flips)
        return self.goto(world, number, rank._replace(phase="look"))

    # An observer pins what is committed, reads it page by page, and gives it back; it does so once. Several stand for one owner: the first version
    # that one sees is the one it wants, and the pin is no one's to give back.

    def do_pin(self, world, number, rank):
        following = rank._replace(phase="pinning", index=world.state)
        return self.goto(world, number, following)

    def do_pinning(self, world, number, rank):
        version, slot = State.of(rank.index)[:2]
        pin = Pin.of(world.pins[slot])
        tried = rounds.pinned(pin, version)
        if self.it.mutant == "pins over":
            tried = tried or Pin(version, 1, pin.turn)
        if tried is None:
            return self.goto(world, number, self.in_vain())
        after = self.put_pin(world, slot, tried)
        return self.goto(after, number, rank._replace(phase="pinned", cover=(tried,)))

    def do_pinned(self, world, number, rank):
        version, slot = State.of(rank.index)[:2]
        if world.state != rank.index and self.it.mutant != "pins late":
            is_same = State.of(world.state).version == version
            following = {"index": world.state} if is_same else {"phase": "withdraw"}
            return self.goto(world, number, rank._replace(**following))
        after = world._replace(state=rounds.pinning(State.of(world.state)).word)
        following = rank._replace(phase="read", version=version, slot=slot, index=0)
        return self.goto(after, number, following)

    def do_withdraw(self, world, number, rank):
        slot = State.of(rank.index).slot
        pin = Pin.of(world.pins[slot])
        after = rounds.withdrawn(pin, rank.cover[0])
        if self.it.mutant == "wipes pins":
            after = rounds.given_back(pin)
        if self.it.mutant == "leaves pins":
            after = None
        world = world if after is None else self.put_pin(world, slot, after)
        return self.goto(world, number, self.in_vain())

    def in_vain(self):
        return Rank(phase="pin" if self.it.observers == 1 else "gone")

    def do_read(self, world, number, rank):
        if world.versions[rank.slot][rank.index] != ("s", rank.version):
            raise Violation(f"a pinned version {rank.version} reads {world.versions[rank.slot]}")
        if rank.index + 1 < self.it.pages:
            return self.goto(world, number, rank._replace(index=rank.index + 1))
        if self.it.observers > 1:
            return self.goto(world, number, Rank(phase="gone", slot=rank.slot))
        pin = Pin.of(world.pins[rank.slot])
        after = self.put_pin(world, rank.slot, rounds.given_back(pin))
        return self.goto(after, number, Rank(phase="gone"))

    @staticmethod
    def pinned(world):
        return {slot for slot, word in enumerate(world.pins) if Pin.of(word).version != NONE}

    @staticmethod
    def put_pin(world, slot, pin):
        return world._replace(pins=put(world.pins, slot, pin.word))

    # --- invariants ---------------------------------------------------------------------------

    def check(self, world):
        state = State.of(world.state)
        visible = world.versions[state.slot]
        if visible != (("s", state.version),) * self.it.pages:
            raise Violation(f"version {state.version} is visible as {visible}")
        if world.flips != tuple(range(1, state.version + 1)):
            raise Violation(f"flips {world.flips} for version {state.version}")

    def check_end(self, world):
        """A state without transitions other than crashes."""
        ranks, observers = world.ranks[: self.it.ranks], world.ranks[self.it.ranks :]
        alive = [rank for rank in ranks if rank.phase not in ("gone", "dead")]
        if any(rank.phase != "finished" for rank in alive):
            raise Violation(f"deadlock: {[rank.phase for rank in world.ranks]}")
        if alive and world.weights != (("w", self.it.steps),) * self.it.pages:
            raise Violation(f"ends with weights {world.weights}")
        if self.pinned(world) != {observer.slot for observer in observers} - {-1}:
            raise Violation(f"ends with pins {[Pin.of(word) for word in world.pins]}")


def explore(instance):
    """Visit every reachable state; the number of them. A violation tells the story that led to it."""
    model = Model(instance)
    first = model.first()
    cause = {first: None}
    waiting = [first]
    world = first
    try:
        while waiting:
            world = waiting.pop()
            model.check(world)
            following = model.successors(world)
            if all(label.endswith("dies") for label, _ in following):
                model.check_end(world)
            for label, after in following:
                if after not in cause:
                    cause[after] = (world, label)
                    waiting.append(after)
    except Violation as violation:
        story = []
        while cause[world] is not None:
            world, label = cause[world]
            story.append(label)
        raise Violation(f"{violation}; after: {', '.join(reversed(story))}") from None
    return len(cause)


TWO_STEPS = Instance()
REPLACED = Instance(steps=1, has_replacement=True)
TWO_PARTS = Instance(steps=1, parts=2, has_replacement=True)
THREE_RANKS = Instance(ranks=3, lanes=3, steps=1)
OBSERVED = Instance(crashes=0, observers=1)
ONE_PIN_FOR_TWO = Instance(ranks=1, lanes=1, pages=1, steps=2, crashes=0, observers=2, versions=4)
SPARE_RANK = Instance(ranks=3, lanes=1, pages=1, crashes=0)
FEW_SLOTS = Instance(ranks=1, lanes=6, steps=1, has_replacement=True, num_slots=2, crashes=2)


@pytest.mark.parametrize(
    ("instance", "least_states"),
    [
        (TWO_STEPS, 5_000),
        (Instance(steps=2, has_replacement=True), 10_000),
        (Instance(pages=1, steps=1, has_replacement=True, crashes=2), 10_000),
        (TWO_PARTS, 10_000),
        (Instance(ranks=3, lanes=2, steps=1), 20_000),
        (OBSERVED, 5_000),
        (Instance(observers=1, versions=3, steps=1), 10_000),
        (ONE_PIN_FOR_TWO, 10_000),
        (SPARE_RANK, 1_000),
        (FEW_SLOTS, 1_000),
        (Instance(lanes=6, pages=1, steps=1, num_slots=4, has_replacement=True), 10_000),
    ],
    ids=str,
)
def test_every_interleaving_and_every_crash_ends_with_the_same_bits(instance, least_states):
    assert explore(instance) >= least_states


@pytest.mark.parametrize(
    ("mutant", "instance", "what"),
    [
        ("seal first", TWO_STEPS, "is visible as"),
        ("no clear", FEW_SLOTS, "is visible as"),
        ("flips early", TWO_STEPS, "is visible as"),
        ("overwrites", TWO_STEPS, "is visible as"),
        ("no barrier", THREE_RANKS, "is visible as"),
        ("not reaped", TWO_STEPS, "begins version"),
        ("claims valid blocks", TWO_STEPS, "deadlock"),
        ("claims late", TWO_PARTS, "no slot"),
        ("hurries on", TWO_PARTS, "deadlock"),
        ("ignores pins", OBSERVED, "a pinned version"),
        ("pins late", OBSERVED, "a pinned version"),
        ("wipes pins", ONE_PIN_FOR_TWO, "ends with pins"),
        ("leaves pins", ONE_PIN_FOR_TWO, "ends with pins"),
        ("pins over", ONE_PIN_FOR_TWO, "ends with pins"),
        ("votes unchecked", SPARE_RANK, "votes of another round"),
    ],
)
def test_a_broken_protocol_is_caught(mutant, instance, what):
    with pytest.raises(Violation, match=what):
        explore(instance._replace(mutant=mutant))
