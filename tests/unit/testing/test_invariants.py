from __future__ import annotations

import pytest

from argosy.errors import InvariantError
from argosy.protocol.facts import (
    AttemptExited,
    AttemptPlanned,
    CommandAccepted,
    CommandDone,
    Event,
    GenerationFormed,
    Note,
    RunEnded,
)
from argosy.testing.invariants import Invariants
from argosy.testing.processes import SimulatedProcess


class Book:
    """Invariants with a log that numbers itself."""

    def __init__(self):
        self.invariants = Invariants()
        self.seq = 0

    def log(self, fact, source=None):
        self.seq += 1
        self.invariants.durable(Event(seq=self.seq, at=0.0, fact=fact, source=source))

    def plan(self, index=0, number=0, **more):
        name = f"r.t.{index}.{number}"
        self.log(
            AttemptPlanned(
                attempt=name, run="r", role="t", index=index, number=number, host="h", **more
            )
        )

    def form(self, generation, members):
        self.log(
            GenerationFormed(run="r", role="t", generation=generation, members=members, reason="")
        )


def process(index=0, number=0, generation=0, rank=None, **more):
    return SimulatedProcess(
        attempt=f"r.t.{index}.{number}",
        run="r",
        role="t",
        index=index,
        generation=generation,
        rank=rank,
        state="running",
        host="h",
        is_gang=rank is not None,
        **more,
    )


@pytest.fixture
def book():
    return Book()


def test_a_start_without_a_durable_plan_is_seen(book):
    with pytest.raises(InvariantError, match="durable"):
        book.invariants.started(process())


def test_the_same_attempt_started_twice_is_seen(book):
    book.plan()
    book.invariants.started(process())
    book.invariants.exited(process())
    with pytest.raises(InvariantError, match="twice"):
        book.invariants.started(process())


def test_two_attempts_of_one_process_at_once_are_seen(book):
    book.plan()
    book.plan(number=1)
    book.invariants.started(process())
    with pytest.raises(InvariantError, match="both alive"):
        book.invariants.started(process(number=1))


def test_a_rank_that_is_not_its_own_is_seen(book):
    book.form(1, [0, 1])
    book.plan()
    with pytest.raises(InvariantError, match="not its own"):
        book.invariants.started(process(generation=1, rank=1))


def test_a_generation_that_overlaps_with_the_one_before_is_seen(book):
    book.form(1, [0, 1])
    book.plan(0)
    book.plan(1)
    book.plan(0, 1)
    first, second = process(0, generation=1, rank=0), process(1, generation=1, rank=1)
    book.invariants.started(first)
    book.invariants.started(second)
    book.invariants.exited(first)
    book.form(2, [0, 1])
    with pytest.raises(InvariantError, match="not reaped"):
        book.invariants.started(process(0, 1, generation=2, rank=0))


def test_a_survivor_that_joined_may_meet_the_next_generation(book):
    book.form(1, [0, 1])
    for index, number in ((0, 0), (1, 0), (0, 1)):
        book.plan(index, number)
    first, second = process(0, generation=1, rank=0), process(1, generation=1, rank=1)
    second.is_joined = True
    book.invariants.started(first)
    book.invariants.started(second)
    book.invariants.exited(first)
    book.form(2, [0, 1])
    book.invariants.started(process(0, 1, generation=2, rank=0))


def test_an_ended_run_with_a_process_is_seen(book):
    book.plan()
    book.invariants.started(process())
    with pytest.raises(InvariantError, match="alive"):
        book.log(RunEnded(run="r", outcome="succeeded", exit_code=0))


def test_a_start_after_the_end_is_seen(book):
    book.plan()
    book.log(RunEnded(run="r", outcome="succeeded", exit_code=0))
    with pytest.raises(InvariantError, match="after its run had ended"):
        book.invariants.started(process())


def test_an_exit_of_a_living_process_is_seen(book):
    book.plan()
    book.invariants.started(process())
    with pytest.raises(InvariantError, match="is alive"):
        book.log(AttemptExited(attempt="r.t.0.0", run="r", code=0))


def test_a_source_that_is_in_the_log_twice_is_seen(book):
    book.log(Note(text="a"), ("k", 1))
    with pytest.raises(InvariantError, match="twice"):
        book.log(Note(text="b"), ("k", 1))


def test_a_hole_in_the_log_is_seen(book):
    with pytest.raises(InvariantError, match="follows"):
        book.invariants.durable(Event(seq=5, at=0.0, fact=Note(text="x")))


def test_a_command_without_an_outcome_is_seen_at_rest(book):
    book.log(CommandAccepted(command="c1", verb="stop"))
    with pytest.raises(InvariantError, match="no outcome"):
        book.invariants.at_rest(set())
    book.log(CommandDone(command="c1", outcome="ok"))
    book.invariants.at_rest(set())
    with pytest.raises(InvariantError, match="done twice"):
        book.log(CommandDone(command="c1", outcome="ok"))


def test_an_event_of_a_keeper_that_the_log_misses_is_seen_at_rest(book):
    book.invariants.emitted("k", 1, {"event": "exited", "attempt": "r.t.0.0"})
    book.invariants.at_rest({"k"})
    with pytest.raises(InvariantError, match="misses"):
        book.invariants.at_rest(set())
