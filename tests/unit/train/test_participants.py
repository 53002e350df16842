"""Who takes part in a turn: the first list counts, until nobody of it is left."""

import itertools
import os

import pytest

from argosy.train.participants import Participants

names = (f"participants-{number}" for number in itertools.count())


@pytest.fixture
def pair():
    """Two processes' views, as far as they are in one."""
    name = next(names)
    return [Participants(name, most_ranks=4) for _ in range(2)]


def test_the_first_list_of_a_turn_counts_for_everybody(pair):
    mine, theirs = pair
    assert mine.agree(0, 0, [10, 11]) == [10, 11]
    assert theirs.agree(0, 1, [10, 11, 12]) == [10, 11]
    assert theirs.agree(1, 1, [10, 11, 12]) == [10, 11, 12]
    assert mine.agree(1, 0, [10, 11]) == [10, 11, 12]


def test_a_turn_that_is_past_has_no_list_and_is_not_written_to(pair):
    mine, theirs = pair
    assert mine.agree(6, 0, [10]) == [10]
    assert theirs.agree(5, 1, [11]) is None
    assert theirs.agree(2, 1, [11]) is None
    assert mine.agree(6, 0, [10, 12]) == [10]


def test_when_nobody_of_the_list_is_left_there_is_another_one(pair):
    mine, theirs = pair
    assert mine.agree(3, 0, [10, 11]) == [10, 11]
    assert theirs.agree(3, 1, [12, 13]) == [12, 13]
    assert theirs.agree(3, 1, [14]) == [14]
    assert theirs.agree(3, 1, [14, 15]) == [14]


def test_marks_belong_to_a_process_and_grow_with_calls_and_turns(pair):
    mine, theirs = pair
    pid = os.getpid()
    mine.mark(2, 7, 1)
    assert theirs.has_marked(2, pid, 7, 1)
    assert theirs.has_marked(2, pid, 6, 200)
    assert not theirs.has_marked(2, pid, 7, 2)
    assert not theirs.has_marked(2, pid, 8, 0)
    assert not theirs.has_marked(2, pid + 1, 7, 1)
    assert not theirs.has_marked(1, pid, 0, 0)
