"""A group's name is that of no group before it, whatever is found of that one."""

import threading

import pytest

from argosy.checkpoint.meetings import meet
from argosy.errors import TimedOut


class Words:
    """A board whose content outlives the groups."""

    def __init__(self):
        self.all = {}

    def post(self, key, data):
        self.all[key] = data

    def find(self, key):
        return self.all.get(key)


def meeting(board, ranks, size):
    found = {}
    threads = [
        threading.Thread(target=lambda r=rank: found.update({r: meet(board, r, size, 30)}))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == set(ranks)
    (name,) = set(found.values())
    return name


def test_generations_on_one_board_have_names_of_their_own():
    board = Words()
    names = [meeting(board, order, 3) for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    assert len(set(names)) == 3
    assert meeting(board, [1, 0], 2) not in names, "fewer of them"
    assert meeting(board, range(5), 5) not in names, "more of them"


def test_one_that_comes_early_does_not_take_the_name_of_the_group_before():
    board = Words()
    before = meeting(board, [0, 1], 2)
    with pytest.raises(TimedOut, match="rank 0 has not come to save or load"):
        meet(board, 1, 2, 0.05)
    with pytest.raises(TimedOut, match=r"ranks \[1\] have not come"):
        meet(board, 0, 2, 0.05)
    assert meeting(board, [0, 1], 2) != before
