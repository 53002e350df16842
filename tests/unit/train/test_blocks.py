"""Blocks of a rank: what is published when, and what remains after an interruption. On a real exchange of one process."""

import time
from types import SimpleNamespace

import pytest

from argosy.move import Layout, Parameter, Round, exchange
from argosy.train.blocks import Blocks
from argosy.train.crew import Moved

LAYOUT = Layout(
    num_lanes=8,
    most_ranks=4,
    parameters=(Parameter(name="w", numel=4),),
    terms=("a",),
    num_slots=4,
)
NODES = LAYOUT.blocks(0, 8)
ROUND = Round(0, 0)


class Patience:
    def wait(self, call, awaited):
        return call(time.monotonic() + 5)


class Case:
    """A rank that may be told of a new membership after some blocks."""

    def __init__(self, name, members=(0,), moves_after=None):
        self.exchange = exchange.open(name, LAYOUT, scope="process")
        self.exchange.enter(0, 0, {0: -1}, deadline=time.monotonic() + 5)
        self.crew = SimpleNamespace(members=members, look=self.look)
        self.blocks = Blocks(self.crew, self.exchange, Patience())
        self.moves_after = moves_after
        self.story = []

    def look(self):
        filled = sum(what == "fill" for what, _ in self.story)
        if filled == self.moves_after:
            raise Moved

    def fill(self, claim):
        self.story.append(("fill", claim.node.first))
        claim.flat.fill_(float(claim.node.first))
        return frozenset({"w"}), {"a": (1.0, 2.0)}

    def compute(self, nodes=NODES):
        self.blocks.compute(
            ROUND, nodes, self.fill, lambda c: self.story.append(("publish", c.node.first))
        )

    @property
    def published(self):
        return [block.node for block in self.exchange.published(ROUND)]


@pytest.fixture
def case(request):
    made = []

    def make(**given):
        made.append(Case(f"{request.node.name[:40]}.{len(made)}", **given))
        return made[-1]

    yield make
    for each in made:
        each.exchange.close()


def test_a_lone_rank_publishes_its_blocks_together(case):
    alone = case()
    alone.compute()
    firsts = [node.first for node in NODES]
    assert alone.story == [("fill", f) for f in firsts] + [("publish", f) for f in firsts]
    gathered = alone.exchange.wait_lanes(ROUND, deadline=time.monotonic() + 5)
    assert gathered.terms["a"] == (4.0, 8.0)


def test_a_rank_among_others_publishes_each_block_at_once(case):
    one = case(members=(0, 1))
    one.compute()
    assert one.story == [(what, n.first) for n in NODES for what in ("fill", "publish")]


def test_an_interrupted_lone_rank_publishes_what_is_filled_and_gives_the_rest_back(case):
    alone = case(moves_after=2)
    with pytest.raises(Moved):
        alone.compute()
    assert alone.published == NODES[:2]
    assert alone.exchange.writers(ROUND) == []
    alone.moves_after = None
    alone.story.clear()
    alone.compute()
    # Blocks are there already: now one after the other, since others' may leave too few slots for all at once.
    rest = [node.first for node in NODES[2:]]
    assert alone.story == [(what, first) for first in rest for what in ("fill", "publish")]


def test_a_lane_that_raises_leaves_no_claim(case):
    alone = case()

    def fill(claim):
        if claim.node == NODES[1]:
            raise ZeroDivisionError
        return alone.fill(claim)

    with pytest.raises(ZeroDivisionError):
        alone.blocks.compute(ROUND, NODES, fill, lambda claim: None)
    assert alone.published == NODES[:1]
    assert alone.exchange.writers(ROUND) == []


def test_more_blocks_than_slots_are_taken_one_by_one(case):
    alone = case()
    singles = [LAYOUT.blocks(lane, 1)[0] for lane in range(8)]
    alone.compute(singles)
    gathered = alone.exchange.wait_lanes(ROUND, deadline=time.monotonic() + 5)
    assert gathered.terms["a"] == (8.0, 16.0)
