"""The layout of an exchange: pages never span parameters, nothing overlaps, other layouts have other digests."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.errors import ConfigError
from argosy.move.layout import PAGE_ELEMENTS, Layout, Parameter


def layout_of(*sizes, lanes=8, ranks=4, **more):
    parameters = tuple(Parameter(name=f"p{i}", numel=n) for i, n in enumerate(sizes))
    return Layout(num_lanes=lanes, most_ranks=ranks, parameters=parameters, **more)


@given(st.lists(st.integers(1, 3 * PAGE_ELEMENTS), min_size=1, max_size=8))
def test_pages_tile_each_parameter_and_never_span_two(sizes):
    layout = layout_of(*sizes)
    end = 0
    for index, size in enumerate(sizes):
        start, stop = layout.span(f"p{index}")
        assert stop - start == size
        assert start >= end
        end = stop
        position = start
        for page in layout.pages_of(f"p{index}"):
            first, last = layout.bounds(page)
            assert first == position
            assert 0 < last - first <= PAGE_ELEMENTS
            assert layout.parameter_of(page) == index
            position = last
        assert position == stop
    assert layout.num_pages == sum(len(layout.pages_of(f"p{i}")) for i in range(len(sizes)))
    assert end <= layout.num_elements


@given(
    st.lists(st.integers(1, 2 * PAGE_ELEMENTS), min_size=1, max_size=8),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(0, 100),
)
def test_regions_of_the_memory_do_not_overlap(sizes, lanes, ranks, extra):
    layout = layout_of(*sizes, lanes=lanes, ranks=ranks, extra_bytes=extra)
    places, pages = layout.places, layout.num_pages
    regions = [
        (places.digest, 8),
        (places.progress, 8),
        (places.state, 8),
        (places.entered, 64 * layout.num_owners),
        (places.pins, 8 * layout.num_owners * layout.num_versions),
        (places.done, 8 * pages),
        (places.refreshed, 8 * pages),
        (places.vote_rounds, 8 * pages),
        (places.vote_values, 8 * pages),
        (places.headers, layout.slots * places.header_bytes),
        (places.slots, layout.slots * places.slot_bytes),
    ]
    for (start, length), (following, _) in itertools.pairwise(regions):
        assert start + length <= following
    assert places.slots % 4096 == 0
    assert places.total == places.slots + layout.slots * places.slot_bytes


def test_there_is_a_slot_for_each_pair_and_each_split():
    assert layout_of(10, lanes=8, ranks=4).slots == 4 + 4
    assert layout_of(10, lanes=8, ranks=1).slots == 4 + 1
    assert layout_of(10, lanes=3, ranks=9).slots == 3
    assert layout_of(10, lanes=64, ranks=2, num_slots=12).slots == 12


def test_any_difference_is_another_digest():
    base = layout_of(10, 20)
    assert base.digest == layout_of(10, 20).digest
    others = [
        layout_of(20, 10),
        layout_of(10, 20, lanes=7),
        layout_of(10, 20, ranks=5),
        layout_of(10, 20, terms=("a", "b")),
        layout_of(10, 20, extra_bytes=8),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 6


@given(st.lists(st.integers(1, PAGE_ELEMENTS), min_size=1, max_size=12), st.integers(1, 6))
def test_shares_give_each_parameter_to_one_owner(sizes, count):
    layout = layout_of(*sizes)
    given_away = [name for owner in range(count) for name in layout.share(owner, count)]
    assert sorted(given_away) == sorted(layout.indices)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"lanes": 0}, "num_lanes = 0"),
        ({"ranks": 0}, "most_ranks = 0"),
        ({"num_versions": 1}, "num_versions = 1"),
        ({"num_slots": 1}, "num_slots = 1"),
        ({"terms": ("a", "a")}, "repeat"),
    ],
)
def test_bad_layouts_are_refused(arguments, what):
    with pytest.raises(ConfigError, match=what):
        layout_of(10, **arguments)


def test_bad_parameters_are_refused():
    with pytest.raises(ConfigError, match="without parameters"):
        layout_of()
    with pytest.raises(ConfigError, match="0 elements"):
        layout_of(3, 0)
    twice = tuple(Parameter(name="w", numel=3) for _ in range(2))
    with pytest.raises(ConfigError, match="'w' is there twice"):
        Layout(num_lanes=1, most_ranks=1, parameters=twice)
    with pytest.raises(ConfigError, match="no parameter 'q'"):
        layout_of(3).pages_of("q")
