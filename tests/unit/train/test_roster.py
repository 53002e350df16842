"""Signs of life in the table of ranks."""

import itertools
import os

import pytest

from argosy.train.roster import Roster

names = (f"roster-{number}" for number in itertools.count())


@pytest.fixture
def roster():
    return Roster(next(names), most_ranks=4, num_parameters=1, title=7)


def test_one_that_does_not_know_its_new_rank_yet_is_seen_between_two_steps_and_looking_up(roster):
    pid = os.getpid()
    roster.leave_step(2)
    roster.beat(2)
    for rank in (2, 1):  # as the others know it before and after a change of generation
        assert roster.is_outside(rank, pid)
        assert roster.beats(rank, pid) == 1
    roster.enter_step(1)
    roster.beat(1)
    assert not roster.is_outside(1, pid)
    assert roster.beats(1, pid) == 2


def test_signs_of_another_process_are_not_taken_for_this_ones(roster):
    roster.leave_step(2)
    assert not roster.is_outside(2, os.getpid() + 1)
    assert roster.beats(2, os.getpid()) == 0


def test_rows_are_of_processes_that_live(roster):
    roster.enlist(5, 3)
    assert roster.rows() == [(5, 3, os.getpid())]
    assert roster.has_enlisted(5, 3)
    assert not roster.has_enlisted(1, 3)


def test_one_whose_loop_is_over_is_outside_until_it_takes_a_step_again(roster):
    pid = os.getpid()
    for _ in range(2):
        roster.enter_step(0)
        assert not roster.is_outside(0, pid)
        assert not roster.has_left_loop(0, pid)
        roster.leave_step(0)
        assert roster.is_outside(0, pid)
        assert not roster.has_left_loop(0, pid)
        roster.leave_loop(0)
        assert roster.is_outside(0, pid)
        assert roster.has_left_loop(0, pid)
