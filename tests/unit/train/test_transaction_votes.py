"""Votes of a step that is computed again: on a real exchange, as a rank sees them that has no lanes and is late."""

import time
from types import SimpleNamespace

import pytest

from argosy.errors import TimedOut
from argosy.move import Layout, Parameter, Round, exchange
from argosy.train.crew import Moved
from argosy.train.transaction import ATTEMPT_BITS, Transaction

LAYOUT = Layout(
    num_lanes=1, most_ranks=2, parameters=tuple(Parameter(name=name, numel=4) for name in "ab")
)
FIRST, AGAIN = Round(0, 0), Round(0, 1 << ATTEMPT_BITS)


class Patience:
    """One try, and another when the first has timed out."""

    def wait(self, call, awaited):
        try:
            return call(time.monotonic())
        except TimedOut:
            return call(time.monotonic() + 5)


@pytest.fixture
def late():
    opened = exchange.open("unit-late-rank", LAYOUT, scope="process")
    opened.enter(0, 0, {0: -1}, deadline=time.monotonic() + 5)
    attempts = {0: 0}
    rank = Transaction.__new__(Transaction)
    rank.crew = SimpleNamespace(roster=SimpleNamespace(attempt_of=attempts.__getitem__))
    rank._exchange = opened
    rank._holdings = SimpleNamespace(owners_of=lambda pages: [])
    rank.patience = Patience()
    yield SimpleNamespace(rank=rank, exchange=opened, attempts=attempts)
    opened.close()


def test_a_late_rank_does_not_wait_for_votes_that_the_next_attempt_has_replaced(late):
    late.exchange.vote(FIRST, [0, 1], [1.0, float("nan")])
    late.attempts[0] = 1
    late.exchange.vote(AGAIN, [1], [2.0])
    with pytest.raises(Moved):
        late.rank._wait_votes(FIRST)


def test_votes_of_two_attempts_are_not_judged_together(late, monkeypatch):
    late.exchange.vote(FIRST, [0, 1], [1.0, float("nan")])
    fence = late.exchange._progress.fence

    def others_go_on():
        if not late.attempts[0]:
            late.attempts[0] = 1
            late.exchange.vote(AGAIN, [1], [2.0])
        fence()

    monkeypatch.setattr(late.exchange._progress, "fence", others_go_on)
    with pytest.raises(Moved):
        late.rank._wait_votes(FIRST)


def test_votes_of_the_attempt_under_way_are_returned(late):
    late.attempts[0] = 1
    late.exchange.vote(AGAIN, [0, 1], [1.0, 2.0])
    assert late.rank._wait_votes(AGAIN) == [1.0, 2.0]
