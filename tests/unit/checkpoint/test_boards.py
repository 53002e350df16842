"""What all have said they all go on with, whatever one of them says after it."""

import pytest

from argosy.checkpoint import boards
from argosy.checkpoint.boards import BoardGone, FileBoard, Group, PartnerFailed, StoreBoard


def test_who_fails_after_it_has_said_something_has_said_it(tmp_path):
    board, group = FileBoard(tmp_path), Group(0, 2)

    def fails_in_between(missing):
        assert missing == [1]
        board.post("word-00001", b"two")
        raise PartnerFailed("rank 1 has failed", fix="")

    assert boards.exchange(board, "word", b"one", group, fails_in_between) == [b"one", b"two"]


def test_who_fails_before_ends_the_wait(tmp_path):
    def fails(missing):
        raise PartnerFailed("rank 1 has failed", fix="")

    with pytest.raises(PartnerFailed):
        boards.exchange(FileBoard(tmp_path), "word", b"one", Group(0, 2), fails)


class Gone:
    """A store whose host has ended."""

    def set(self, *_):
        raise RuntimeError("Broken pipe")

    get = check = add = set


def test_a_store_that_is_gone_is_an_error_with_a_fix():
    board = StoreBoard(Gone(), "x")
    for ask in (
        lambda: board.post("a", b""),
        lambda: board.find("a"),
        lambda: board.enlist("a"),
        lambda: board.enlisted("a"),
    ):
        with pytest.raises(BoardGone, match="Broken pipe"):
            ask()
