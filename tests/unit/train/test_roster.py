"""Who is there, and signs of life in the table of ranks."""

import itertools
import os

import pytest
import torch

from argosy.errors import ConfigError, MismatchError
from argosy.train.roster import Roster, start_time

names = (f"roster-{number}" for number in itertools.count())


@pytest.fixture
def roster():
    return Roster(next(names), most_ranks=4, num_parameters=1, title=7)


def test_one_whose_rank_changes_is_seen_by_those_who_know_it_and_those_who_do_not(roster):
    pid = os.getpid()
    roster.leave_step(2)
    roster.beat(2)
    assert roster.is_outside(pid)
    assert roster.beats(pid) == 1
    roster.enter_step(1)  # what it left under its old rank says nothing of it any more
    roster.beat(1)
    assert not roster.is_outside(pid)
    assert roster.beats(pid) == 2


def test_signs_of_another_process_are_not_taken_for_this_ones(roster):
    roster.leave_step(2)
    assert not roster.is_outside(os.getpid() + 1)
    assert roster.beats(os.getpid()) == 0


def test_what_an_earlier_process_of_the_same_id_has_left_is_not_taken_for_this_ones():
    name, pid = next(names), os.getpid()
    earlier = Roster(name, most_ranks=4, num_parameters=1, title=7)
    for _ in range(3):
        earlier.beat(2)
    earlier.enter_step(2)
    earlier.leave_loop(2)
    later = Roster(name, most_ranks=4, num_parameters=1, title=7)
    later.beat(1)
    assert later.beats(pid) == 4
    later.leave_step(1)
    assert later.is_outside(pid)
    assert not later.has_left_loop(pid)
    later.enter_step(1)
    assert not later.is_outside(pid)


def test_one_that_has_enlisted_is_known_by_its_process_and_for_that_generation_alone(roster):
    roster.enlist(5, 3)
    assert roster.process_of(5, 3) == (os.getpid(), start_time(os.getpid()))
    assert roster.has_enlisted(5, 3)
    assert not roster.has_enlisted(1, 3)
    assert roster.process_of(1, 3) is None


def test_one_that_lives_is_remembered_when_another_has_had_its_rank_for_many_generations(
    roster, monkeypatch
):
    own, other = os.getpid(), os.getppid()
    roster.enlist(1, 3)
    monkeypatch.setattr(os, "getpid", lambda: other)
    for generation in range(2, 10):
        roster.enlist(generation, 3)
        assert roster.process_of(generation, 3) == (other, start_time(other))
    assert sorted(roster.muster.last_places()) == [(1, 3, own), (9, 3, other)]
    assert sorted(roster.muster.first_places()) == [(1, 3, own), (2, 3, other)]


def test_a_table_of_another_size_is_refused():
    name = next(names)
    Roster(name, most_ranks=4, num_parameters=1, title=7)
    with pytest.raises(MismatchError, match="another version"):
        Roster(name, most_ranks=4, num_parameters=9, title=7)


def test_one_whose_loop_is_over_is_outside_until_it_takes_a_step_again(roster):
    pid = os.getpid()
    for _ in range(2):
        roster.enter_step(0)
        assert not roster.is_outside(pid)
        assert not roster.has_left_loop(pid)
        roster.leave_step(0)
        assert roster.is_outside(pid)
        assert not roster.has_left_loop(pid)
        roster.leave_loop(0)
        assert roster.is_outside(pid)
        assert roster.has_left_loop(pid)


def test_what_cannot_be_agreed_on_is_refused_with_its_kind(roster):
    with pytest.raises(ConfigError, match=r"step\.agree\(\) was given Tensor: ") as caught:
        roster.agree(0, 0, 1, torch.zeros(2))
    assert "item()" in caught.value.fix
    assert roster.agree(0, 0, 1, {"rate": 0.5}) == {"rate": 0.5}
