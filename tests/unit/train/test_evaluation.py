"""A rank that gets another number in the middle of an evaluation; means."""

import itertools
import math
import os
from types import SimpleNamespace

import pytest

from argosy.train import evaluation
from argosy.train.crew import Moved
from argosy.train.evaluation import Evaluation, Task
from argosy.train.tallies import Tally

names = (f"evaluation-{number}" for number in itertools.count())
LANES = 2
PEER = 1_000_000


class Crew:
    """Rank 1 at first; rank 0 when somebody else has become rank 1."""

    def __init__(self):
        self.rank, self.members, self.is_moving = 1, (0, 1), False
        self.roster = SimpleNamespace(advance=lambda rank: None)

    @property
    def position(self):
        return self.members.index(self.rank)

    def pid_of(self, rank):
        return os.getpid() if rank == self.rank else PEER

    def look(self):
        if self.is_moving:
            self.is_moving = False
            raise Moved


@pytest.fixture
def made(monkeypatch):
    crew, name = Crew(), next(names)
    parts = SimpleNamespace(
        settings=SimpleNamespace(lanes=LANES, most_ranks=4),
        crew=crew,
        exchange=SimpleNamespace(wake=lambda: None),
    )
    found = Evaluation(parts, name)
    sums = {"loss": [1.0, 1.0, 1.0]}
    monkeypatch.setattr(found, "_call", lambda task, lane: {"loss": [10.0 * lane, 1.0, 1.0]})
    return crew, found, Tally(name, most_ranks=4, num_lanes=LANES), sums


def test_the_lane_of_a_renumbered_rank_does_not_get_into_its_successors_record(made):
    crew, found, successors, sums = made
    task = Task(77, 0, None, None, 3)
    crew.is_moving = True
    with pytest.raises(Moved):
        found._compute(task, 1)
    crew.rank = 0
    record = successors.take(1, 77, 0, pid=PEER)  # somebody else is rank 1 now and has taken lane 0
    found._compute(task, 1)
    by_lane = {each.lane: each for each in successors.entries(77) if each.value is not None}
    assert list(by_lane) == [1]
    assert evaluation._means(by_lane[1].value) == {"loss": 10.0}
    successors.finish(record, 77, sums)
    assert sorted(each.lane for each in successors.entries(77) if each.value is not None) == [0, 1]


def test_what_counts_nothing_has_no_mean_and_no_part_in_the_loss():
    found = evaluation._means({"main": [6.0, 3.0, 1.0], "side": [0.0, 0.0, 0.5]})
    assert math.isnan(found["side"])
    assert (found["main"], found["loss"]) == (2.0, 2.0)
