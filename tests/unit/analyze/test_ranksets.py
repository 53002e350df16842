"""Rank sets are written as ranges and read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.analyze.ranksets import format_ranks, parse_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "0"), ([0, 1, 2, 3], "0-3"), ([3, 0, 1], "0-1,3"), ([0, 2, 4], "0,2,4"), ([], "")],
)
def test_ranks_are_written_as_ranges(ranks, text):
    assert format_ranks(ranks) == text


@given(st.sets(st.integers(0, 200), min_size=1))
def test_what_is_written_is_read_back(ranks):
    assert parse_ranks(format_ranks(ranks)) == sorted(ranks)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1,,2"])
def test_what_is_no_rank_set_is_refused(text):
    with pytest.raises(ValueError, match=r"rank|backwards"):
        parse_ranks(text)
