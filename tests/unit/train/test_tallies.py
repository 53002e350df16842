import itertools

import pytest

from argosy.errors import ConfigError
from argosy.train.tallies import Tally

names = (f"tally-{number}" for number in itertools.count())


@pytest.fixture
def pair():
    """Two processes' views, as far as they are in one."""
    name = next(names)
    return [Tally(name, most_ranks=4, num_lanes=2) for _ in range(2)]


def test_a_lane_that_is_taken_is_seen_with_its_process_and_how_far_it_is(pair):
    mine, theirs = pair
    record = mine.take(0, 77, 1, pid=123)
    mine.advance(record, 5)
    (entry,) = theirs.entries(77)
    assert (entry.lane, entry.pid, entry.progress, entry.value) == (1, 123, 5, None)
    assert theirs.entries(78) == []


def test_a_finished_lane_counts_and_comes_first(pair):
    mine, theirs = pair
    mine.take(0, 77, 0, pid=1)
    record = mine.take(0, 77, 1, pid=1)
    mine.finish(record, 77, {"loss": [0.1 + 0.2, 3.0, 1.0]})
    first, second = theirs.entries(77)
    assert (first.lane, first.value) == (1, {"loss": [0.1 + 0.2, 3.0, 1.0]})
    assert (second.lane, second.value) == (0, None)


def test_old_records_of_a_rank_give_way_to_its_new_ones_alone(pair):
    mine, theirs = pair
    kept = theirs.take(1, 77, 0, pid=2)
    theirs.finish(kept, 77, 1)
    for key in range(100, 140):
        mine.take(0, key, 0, pid=1)
    assert mine.entries(100) == []
    assert len(mine.entries(139)) == 1
    assert [each.value for each in mine.entries(77)] == [1]


def test_the_first_total_counts(pair):
    mine, theirs = pair
    key = (5 << 32) | 1
    assert mine.total(key) is None
    assert theirs.agree(key, 2, {"a": 1}) == {"a": 1}
    assert mine.agree(key, 0, {"a": 2}) == {"a": 1}
    assert mine.total(key) == {"a": 1}


def test_a_total_of_another_evaluation_in_the_same_place_is_not_taken_for_this_ones(pair):
    mine, theirs = pair
    one, other = (5 << 32) | 1, (6 << 32) | 1
    mine.agree(one, 0, 1)
    assert theirs.total(other) is None
    assert theirs.agree(other, 1, 2) == 2
    assert mine.total(one) is None
    assert mine.agree(one, 0, 1) == 1


def test_more_than_a_record_holds_is_refused(pair):
    record = pair[0].take(0, 77, 0, pid=1)
    with pytest.raises(ConfigError, match="room for"):
        pair[0].finish(record, 77, {"x" * 2000: [1.0, 1.0, 1.0]})
