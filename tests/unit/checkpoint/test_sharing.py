"""Who reads what for whom: each chunk that several want is read by one of them, and nobody is given what it did not ask for."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import sharing
from argosy.checkpoint.sharing import Need

CHUNK = 1 << 20
SIZE = 40 * CHUNK - 5
BLOCK = 4 * CHUNK


def need(chunks):
    return Need(np.array(sorted(chunks), np.int64), CHUNK, SIZE)


def said(pid, wanted):
    return sharing.wanted_of(pid, {name: need(chunks) for name, chunks in wanted.items() if chunks})


def planned(all_wanted, heard=None):
    """What each place offers, when it has heard of these places."""
    found = []
    for place, wanted in enumerate(all_wanted):
        others = {
            other: said(other, one)
            for other, one in enumerate(all_wanted)
            if other != place and (heard is None or other in heard)
        }
        needs = {name: need(chunks) for name, chunks in wanted.items()}
        found.append(sharing.plan_stretches(needs, place, others, BLOCK))
    return found


def chunks_in(stretch):
    return range(stretch.start // CHUNK, -(-stretch.stop // CHUNK))


WANTED = st.lists(
    st.dictionaries(st.sampled_from("ab"), st.sets(st.integers(0, 39)), max_size=2),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(WANTED)
def test_a_chunk_that_several_want_is_read_once_by_one_of_them_for_all(all_wanted):
    seen = {}
    for place, stretches in enumerate(planned(all_wanted)):
        assert list(stretches) == sorted(stretches, key=lambda one: (one.file, one.start))
        for one in stretches:
            assert one.stop - one.start <= BLOCK
            assert one.stop <= SIZE
            for chunk in chunks_in(one):
                assert (one.file, chunk) not in seen
                seen[one.file, chunk] = place, one.places
    for name in "ab":
        for chunk in range(40):
            who = tuple(p for p, one in enumerate(all_wanted) if chunk in one.get(name, ()))
            reader, takers = seen.get((name, chunk), (None, None))
            assert takers == (who if len(who) > 1 else None)
            assert reader is None or reader in who


def test_those_that_want_the_same_take_turns():
    offers = planned([{"a": set(range(40))}] * 3)
    assert [len(one) for one in offers] == [4, 3, 3]


@settings(max_examples=40, deadline=None)
@given(WANTED)
def test_what_is_in_no_stretch_is_left(all_wanted):
    offers = planned(all_wanted)
    for place, wanted in enumerate(all_wanted):
        for name, chunks in wanted.items():
            mine = [
                one for offer in offers for one in offer if one.file == name and place in one.places
            ]
            left = sharing.rest(need(chunks), [(one.start, one.stop) for one in mine])
            shared = [chunk for one in mine for chunk in chunks_in(one)]
            assert sorted([*left.tolist(), *shared]) == sorted(chunks)


def test_nothing_is_offered_to_one_that_has_not_been_heard():
    everything = {"a": set(range(40))}
    first, second, _ = planned([everything] * 3, heard={0, 1})
    assert {one.places for one in [*first, *second]} == {(0, 1)}


def test_short_runs_are_not_worth_sharing():
    small = Need(np.arange(4), 65536, 10 * 65536)
    other = {1: sharing.wanted_of(7, {"a": small})}
    assert sharing.plan_stretches({"a": small}, 0, other, BLOCK) == ()
    assert sharing.is_common({"a": small}, other[1])
    assert not sharing.is_common({"b": small}, other[1])


def test_too_much_to_say_is_not_said_and_too_many_places_read_alone():
    scattered = Need(np.arange(0, sharing.MOST_BYTES // 4, 2), CHUNK, SIZE)
    assert sharing.wanted_of(1, {"a": scattered}).files == {}
    everything = {"a": need(range(40))}
    last = sharing.MOST_PLACES
    others = {0: sharing.wanted_of(1, everything)}
    assert sharing.plan_stretches(everything, last, others, BLOCK) == ()
    assert sharing.plan_stretches(everything, 0, {last: others[0]}, BLOCK) == ()


def test_a_window_is_no_larger_than_what_goes_through_it():
    (first, *_) = planned([{"a": {0, 1}}, {"a": {0, 1}}])
    assert sharing.measure_of(first, 4, 4096) == sharing.Measure(1, 2 * CHUNK, (0, 1))
    (first, *_) = planned([{"a": set(range(40))}] * 2)
    assert sharing.measure_of(first, 4, 4096) == sharing.Measure(2, BLOCK, (0, 1))
    (first, *_) = planned([{"a": set(range(40))}] * 5)
    assert sharing.measure_of(first, 4, 4096) == sharing.Measure(1, BLOCK, (0, 1, 2, 3, 4))
