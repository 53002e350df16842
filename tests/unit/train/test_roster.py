"""Signs of life in the table of ranks."""

import itertools
import os

import pytest

from argosy.train.roster import Roster

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


def test_rows_are_of_processes_that_live(roster):
    roster.enlist(5, 3)
    assert roster.rows() == [(5, 3, os.getpid())]
    assert roster.has_enlisted(5, 3)
    assert not roster.has_enlisted(1, 3)


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
