"""Who has enlisted for which generation: what is forgotten of those that have ended, and never of those that live."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.errors import ConfigError, InvariantError
from argosy.testing.trainingmemory import Numbers
from argosy.train.memberships import late_veterans
from argosy.train.musters import Muster

RANKS = 3


class World:
    """Processes by their ids, with when they began; and what they share."""

    def __init__(self):
        self.starts = {}
        self.words = Numbers()
        self.muster = Muster(self.words, 64, RANKS, lambda pid: self.starts.get(pid, 0))

    def enlist(self, generation, rank, pid):
        self.starts.setdefault(pid, 1)
        self.muster.enlist(generation, rank, pid)


def test_one_that_is_stopped_is_late_however_many_generations_its_rank_has_had_since():
    world = World()
    world.enlist(1, 1, 101)
    for generation in range(2, 20):
        world.enlist(generation, 1, 200)
        assert late_veterans(world.muster.last_places(), generation) == {1: 101}
    assert sorted(world.muster.first_places()) == [(1, 1, 101), (2, 1, 200)]
    del world.starts[101]
    assert late_veterans(world.muster.last_places(), 19) == {}


def test_one_that_comes_late_to_a_past_generation_does_not_hide_who_has_its_rank_now():
    world = World()
    world.enlist(5, 1, 200)
    world.enlist(1, 1, 101)
    assert world.muster.process_of(5, 1) == (200, 1)
    assert world.muster.process_of(1, 1) is None
    assert late_veterans(world.muster.last_places(), 5) == {1: 101}
    world.enlist(6, 0, 101)
    assert world.muster.process_of(6, 0) == (101, 1)
    world.enlist(5, 2, 101)  # told by another thread of it
    assert sorted(world.muster.last_places()) == [(5, 1, 200), (6, 0, 101)]


def test_the_record_of_one_that_has_ended_is_used_again_and_its_place_known_as_that_of_a_dead():
    world = World()
    world.enlist(1, 0, 100)
    del world.starts[100]
    assert world.muster.process_of(1, 0) == (100, 1)
    for pid in range(101, 140):
        world.enlist(1, 1, pid)
        assert world.muster.last_places() == [(1, 1, pid)]
        del world.starts[pid]
    assert world.muster.process_of(1, 0) == (100, 0)


def test_another_process_with_the_id_of_one_that_has_ended_is_not_taken_for_it():
    world = World()
    world.enlist(1, 0, 99)
    world.enlist(1, 1, 100)
    world.starts[100] = 7
    assert world.muster.last_places() == [(1, 0, 99)]
    del world.starts[99]
    world.enlist(2, 2, 100)
    assert world.muster.process_of(2, 2) == (100, 7)
    assert world.muster.process_of(1, 1) == (100, 0)
    assert world.muster.first_places() == world.muster.last_places() == [(2, 2, 100)]


def test_a_rank_beyond_the_tables_is_refused_and_more_processes_than_records_are_a_bug():
    world = World()
    with pytest.raises(ConfigError, match="rank 3 of at most 3"):
        world.enlist(1, RANKS, 100)
    for pid in range(100, 100 + 2 * RANKS):
        world.enlist(1, 0, pid)
    with pytest.raises(InvariantError, match="6 processes live"):
        world.enlist(1, 0, 99)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enlist", "enlist", "end"]),
            st.integers(1, RANKS),
            st.integers(0, RANKS - 1),
            st.integers(0, 3),
        )
    )
)
def test_whoever_lives_is_known_by_its_first_and_its_last_place(deeds):
    world, newest, first, last, rows = World(), 9, {}, {}, {}
    for number, (deed, pid, rank, back) in enumerate(deeds):
        if deed == "end":
            for known in (world.starts, first, last):
                known.pop(pid, None)
            continue
        newest += 1
        place = (newest - 2 * back, rank, pid)
        world.starts.setdefault(pid, number + 1)
        world.enlist(*place)
        first.setdefault(pid, place)
        last[pid] = max(last.get(pid, place), place)
        row = rows.get((place[0] % 4, rank), place)
        rows[place[0] % 4, rank] = place if place[0] >= row[0] else row
        assert sorted(world.muster.first_places()) == sorted(first.values())
        assert sorted(world.muster.last_places()) == sorted(last.values())
        assert all(world.muster.pid_of(*row[:2]) == row[2] for row in rows.values())
