"""Rank sets are written as ranges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.analyze.ranksets import format_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([0, 1, 2, 3], "0-3"), ([3, 0, 1], "0-1,3"), ([0, 2, 4], "0,2,4"), ([], "")],
)
def test_ranks_are_written_as_ranges(ranks, text):
    assert format_ranks(ranks) == text


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranges_hold_exactly_the_ranks(ranks):
    found = []
    for part in format_ranks(ranks).split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(ranks)
