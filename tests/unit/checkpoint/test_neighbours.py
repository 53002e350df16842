"""Processes that read for each other, as threads over one board: what is shown is whole, and whoever is missing is gone around."""

import os
import threading

import numpy as np
import pytest

from argosy.checkpoint import windows
from argosy.checkpoint.neighbours import Neighbours, Piece
from argosy.checkpoint.sharing import Measure, Need, Stretch
from argosy.checkpoint.windows import Window
from argosy.errors import ArenaGone, ClusterError

CHUNK = 1 << 20
NEEDS = {"a": Need(np.arange(3), CHUNK, 3 * CHUNK)}


class Board:
    """What a store does, in memory."""

    def __init__(self):
        self.said, self.counts = {}, {}
        self.is_gone = False

    def enlist(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts[name] - 1

    def enlisted(self, name):
        return self.counts.get(name, 0)

    def post(self, key, data):
        if self.is_gone:
            raise ClusterError("connection reset")
        self.said[key] = data

    def find(self, key):
        return self.said.get(key)


def together(*bodies):
    """Run them at once; what each returned."""
    found = [None] * len(bodies)

    def run(index):
        found[index] = bodies[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert not any(one.is_alive() for one in threads)
    return found


def loader(neighbour, needs=NEEDS, read=lambda number, block: None, met=lambda: None):
    """A load that notes what it has used of each piece and how it came by it."""

    def load():
        used = []
        with neighbour.visit("one") as visit:
            pieces = visit.meet(needs)
            met()
            for piece in pieces:
                if piece.is_own:
                    piece.give(
                        lambda block, piece=piece: read(piece.number, block),
                        lambda _, piece=piece: used.append(("gave", piece.number)),
                    )
                elif piece.take(lambda _: None):
                    used.append(("took", piece.number))
                else:
                    used.append(("alone", piece.number))
        return used

    return load


def test_the_first_reads_and_the_others_take_every_time():
    board = Board()
    ranks = [Neighbours(board, "h", patience_seconds=20.0) for _ in range(3)]
    for _ in range(2):
        first, second, third = together(*map(loader, ranks))
        assert first == [("gave", 0)]
        assert second == third == [("took", 0)]


def test_one_that_does_not_come_is_gone_around_and_reads_alone_later():
    board = Board()
    ranks = [Neighbours(board, "h", patience_seconds=0.05) for _ in range(3)]
    first, second = together(loader(ranks[1]), loader(ranks[2]))
    assert (first, second) == ([("gave", 0)], [("took", 0)])
    assert (
        loader(ranks[0])() == []
    )  # it has the first place, and nobody waits for what it would offer


def test_other_hosts_and_a_store_that_is_gone_mean_reading_alone():
    board = Board()
    first, second = Neighbours(board, "h"), Neighbours(board, "other")
    assert together(loader(first), loader(second)) == [[], []]
    board.is_gone = True
    assert loader(first)() == []


def test_one_that_fails_to_read_lets_the_others_read_for_themselves():
    board = Board()
    ranks = [Neighbours(board, "h", patience_seconds=20.0) for _ in range(2)]

    has_met = threading.Event()

    def fail(number, block):
        has_met.wait(20)
        raise ValueError("damaged")

    def failing():
        with pytest.raises(ValueError, match="damaged"):
            loader(ranks[0], read=fail)()

    assert together(failing, loader(ranks[1], met=has_met.set)) == [None, [("alone", 0)]]


def test_one_that_fails_beside_it_does_not_hold_the_reader_up():
    board = Board()
    ranks = [Neighbours(board, "h", patience_seconds=20.0) for _ in range(2)]
    needs = {"a": Need(np.arange(48), CHUNK, 48 * CHUNK)}

    def fail():
        raise ValueError("elsewhere")

    def failing():
        with pytest.raises(ValueError, match="elsewhere"):
            loader(ranks[1], needs, met=fail)()

    used, _ = together(loader(ranks[0], needs), failing)
    assert [one for one in used if one[0] == "gave"] == [("gave", number) for number in range(3)]
    assert not [one for one in used if one[0] == "took"]


@pytest.fixture
def window():
    made = Window.create(Measure(2, 4096, (0, 1)))
    yield made
    made.close()


def test_a_window_shows_what_was_published_and_nothing_after_it_is_overwritten(window):

    taker = Window.open(os.getpid(), window.descriptor, window.nonce, Measure(2, 4096, (0, 1)))
    block = window.begin(0)
    assert not taker.is_held(0)
    block.memory[:3] = b"abc"
    window.publish(0)
    assert taker.find(0, 0) is not None
    window.begin(2)
    assert not taker.is_held(0)
    window.end()
    assert taker.find(2, 0) is None
    del block
    taker.close()


def test_a_taker_that_stands_still_is_left_behind(window, monkeypatch):
    monkeypatch.setattr(windows, "STILL_SECONDS", 0.02)
    for number in (0, 2):
        window.take(number, 0)
        window.wait_taken(number, 0, (0, 1))
        monkeypatch.setattr(windows, "STILL_SECONDS", 1e9)  # it is not waited for again


def test_a_block_is_not_filled_again_while_a_slow_disk_is_still_filling_it(monkeypatch):
    monkeypatch.setattr(windows, "STILL_SECONDS", 0.0)
    window = Window.create(Measure(1, 4096, (0, 1)))
    window.leave(1)
    stretches = [Stretch("a", 4096 * n, 4096 * (n + 1), (0, 1)) for n in range(2)]
    pieces = [Piece(one, n, window, 0, 0, (0, 1) if n else ()) for n, one in enumerate(stretches)]
    has_come, done = threading.Event(), []

    def slow(block):
        threading.Timer(0.05, has_come.set).start()
        has_come.wait(20)
        done.append("first")

    together(
        lambda: pieces[0].give(slow, lambda _: None),
        lambda: pieces[1].give(lambda _: done.append("second"), lambda _: None),
    )
    assert done == ["first", "second"]
    window.close()


def test_the_window_of_another_is_refused_when_it_is_not_the_one(window):

    measure = Measure(2, 4096, (0, 1))
    with pytest.raises(ArenaGone, match="another window"):
        Window.open(os.getpid(), window.descriptor, window.nonce + 1, measure)
    with pytest.raises(ArenaGone, match="no window of that size"):
        Window.open(os.getpid(), window.descriptor, window.nonce, Measure(3, 4096, (0, 1)))
    with pytest.raises(ArenaGone, match="cannot be opened"):
        Window.open(os.getpid(), 1 << 20, window.nonce, measure)
