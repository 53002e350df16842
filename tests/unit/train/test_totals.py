import pytest

from argosy.data.batches import Batch
from argosy.errors import ConfigError
from argosy.train.totals import Counted


class Ahead:
    """Batches whose number is 10 * index + lane."""

    def __init__(self):
        self.num_taken = 0

    def take(self, index, lane):
        self.num_taken += 1
        return Batch({"number": 10 * index + lane}, index=index, lane=lane)


def test_totals_are_those_of_all_lanes_and_each_batch_is_read_once():
    ahead = Ahead()
    counted = Counted(ahead, lambda batch: {"a": batch.number, "b": 1}, 4)
    batches = [counted.take(2, lane) for lane in (1, 2)]
    assert [batch.number for batch in batches] == [21, 22]
    assert [batch.totals for batch in batches] == [{"a": 86.0, "b": 4.0}] * 2
    assert ahead.num_taken == 4
    assert counted.take(3, 0).totals["a"] == 30 + 31 + 32 + 33


def test_a_lane_that_is_computed_again_has_its_totals_too():
    counted = Counted(Ahead(), lambda batch: {"a": 1}, 2)
    counted.take(0, 1)
    assert counted.take(0, 1).totals == {"a": 2.0}


def test_what_no_lane_has_is_divided_by_one():
    assert Counted(Ahead(), lambda batch: {"a": 0}, 2).take(0, 0).totals == {"a": 1.0}


def test_a_negative_count_is_refused():
    with pytest.raises(ConfigError, match="counts"):
        Counted(Ahead(), lambda batch: {"a": -1}, 2).take(0, 0)


def test_without_counts_only_the_lane_is_read():
    ahead = Ahead()
    assert Counted(ahead, None, 4).take(0, 3).totals is None
    assert ahead.num_taken == 1
