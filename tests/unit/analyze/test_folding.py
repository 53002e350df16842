"""Folding keeps every line, the order of each rank, and one line for equal ones."""

from hypothesis import given
from hypothesis import strategies as st

from argosy.analyze.folding import Folder


def shown(lines):
    return [(line.text, sorted(rank for _, rank in line.members)) for line in lines]


def fold_all(entries, ranks=4, window_seconds=1.0):
    folder = Folder([("train", rank) for rank in range(ranks)], window_seconds=window_seconds)
    found = []
    for at, rank, text in entries:
        found += folder.add(at, ("train", rank), "out", text)
    return found + folder.drain()


def test_equal_lines_of_all_ranks_become_one_at_once():
    folder = Folder([("train", 0), ("train", 1)])
    assert folder.add(1.0, ("train", 0), "out", "hello") == []
    assert shown(folder.add(1.001, ("train", 1), "out", "hello")) == [("hello", [0, 1])]
    assert folder.deadline() is None


def test_a_line_nobody_else_says_is_shown_after_the_window():
    folder = Folder([("train", 0), ("train", 1)], window_seconds=0.05)
    folder.add(1.0, ("train", 0), "out", "alone")
    assert folder.deadline() == 1.05
    assert folder.flush(1.04) == []
    assert shown(folder.flush(1.05)) == [("alone", [0])]


def test_a_rank_that_repeats_itself_makes_two_lines():
    assert shown(fold_all([(1, 0, "x"), (1, 0, "x"), (1, 1, "x")], ranks=2)) == [
        ("x", [0, 1]),
        ("x", [0]),
    ]


def test_lines_are_not_folded_when_that_would_change_a_ranks_order():
    entries = [(1, 0, "a"), (1, 0, "b"), (1, 1, "b"), (1, 1, "a")]
    assert shown(fold_all(entries, ranks=2)) == [("a", [0]), ("b", [0, 1]), ("a", [1])]


def test_streams_are_never_folded_together():
    folder = Folder([("train", 0), ("train", 1)])
    folder.add(1.0, ("train", 0), "out", "x")
    folder.add(1.0, ("train", 1), "err", "x")
    assert [line.stream for line in folder.drain()] == ["out", "err"]


def test_the_order_between_the_streams_of_a_rank_does_not_prevent_folding():
    folder = Folder([("train", 0), ("train", 1)], window_seconds=1.0)
    found = []
    for rank, stream in ((1, "err"), (1, "out"), (0, "out"), (0, "err")):
        found += folder.add(1.0, ("train", rank), stream, f"to {stream}")
    assert shown(found) == [("to err", [0, 1]), ("to out", [0, 1])]


def test_a_rank_that_has_ended_is_not_waited_for():
    folder = Folder([("train", 0), ("train", 1)])
    folder.forget(("train", 1))
    assert shown(folder.add(1.0, ("train", 0), "out", "x")) == [("x", [0])]


def test_a_flood_is_not_held_back_beyond_the_limit():
    folder = Folder([("train", 0), ("train", 1)], window_seconds=1e9, most_pending=10)
    found = []
    for number in range(100):
        found += folder.add(1.0, ("train", 0), "out", str(number))
    assert len(found) == 90


def test_a_live_line_waits_from_when_it_was_received_not_from_when_it_was_written():
    folder = Folder([("train", 0), ("train", 1)], window_seconds=0.1)
    assert folder.add(1.0, ("train", 0), "out", "late", now=9.0) == []
    assert shown(folder.add(1.0, ("train", 1), "out", "late", now=9.05)) == [("late", [0, 1])]


@given(
    st.lists(
        st.tuples(st.floats(0, 0.3), st.integers(0, 3), st.sampled_from(["a", "b", "c"])),
        max_size=60,
    )
)
def test_every_rank_sees_exactly_its_own_lines_in_order(steps):
    at, entries = 0.0, []
    for delay, rank, text in steps:
        at += delay
        entries.append((at, rank, text))
    folded = fold_all(entries, window_seconds=0.2)
    for rank in range(4):
        said = [text for _, who, text in entries if who == rank]
        assert [line.text for line in folded if ("train", rank) in line.members] == said
    assert all(len(line.members) == len(set(line.members)) for line in folded)
