"""Prefetch changes when a batch is computed and nothing else."""

import os
import threading
import time

import pytest
import torch

from argosy.data import prefetch
from argosy.data.batches import Batch
from argosy.data.datasets import as_source
from argosy.data.prefetch import QUICK_SECONDS, Ahead, Trial


class Gated:
    """Computes only when told to; says who computed what."""

    def __init__(self):
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.made = []

    def batch(self, index, lane):
        self.begun.release()
        assert self.gate.acquire(timeout=10)
        self.made.append((index, lane, threading.current_thread().name))
        if index < 0:
            raise ValueError(f"no batch {index}")
        return Batch({"x": torch.tensor([index * 10 + lane])}, index=index, lane=lane)


@pytest.fixture
def feed():
    return Gated()


@pytest.fixture
def ahead(feed):
    ahead = Ahead(feed, depth=2)
    yield ahead
    for _ in range(20):
        feed.gate.release()
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name == "argosy-ahead"]


def wait_ready(ahead, count):
    deadline = time.monotonic() + 10
    while ahead.statistics()["waiting"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def value(ahead, index, lane):
    return int(ahead.take(index, lane).x)


def test_expected_batches_are_computed_in_the_background(feed, ahead):
    ahead.expect([(0, 0), (0, 1)])
    feed.gate.release(2)
    wait_ready(ahead, 2)
    assert [value(ahead, 0, 0), value(ahead, 0, 1)] == [0, 1]
    assert feed.made == [(0, 0, "argosy-ahead"), (0, 1, "argosy-ahead")]
    assert ahead.statistics() == {"taken": 2, "ready": 2, "waiting": 0}


def test_what_was_not_expected_is_computed_at_once(feed, ahead):
    feed.gate.release(1)
    assert value(ahead, 3, 1) == 31
    assert feed.made == [(3, 1, "MainThread")]


def test_at_most_depth_batches_wait(feed, ahead):
    ahead.expect([(0, lane) for lane in range(6)])
    feed.gate.release(6)
    for _ in range(2):
        assert feed.begun.acquire(timeout=10)
    assert not feed.begun.acquire(timeout=0.1)
    assert [value(ahead, 0, lane) for lane in range(6)] == list(range(6))


def test_new_expectations_replace_the_old(feed, ahead):
    ahead.expect([(0, 0), (0, 1), (0, 2)])
    assert feed.begun.acquire(timeout=10)
    ahead.expect([(5, 0), (5, 1)])
    feed.gate.release(3)
    wait_ready(ahead, 2)
    assert [value(ahead, 5, 0), value(ahead, 5, 1)] == [50, 51]
    assert [made[:2] for made in feed.made] == [(0, 0), (5, 0), (5, 1)]


def test_errors_are_raised_where_the_batch_is_taken(feed, ahead):
    ahead.expect([(-1, 0), (1, 0)])
    feed.gate.release(3)
    with pytest.raises(ValueError, match="no batch -1"):
        ahead.take(-1, 0)
    assert value(ahead, 1, 0) == 10


def test_take_waits_for_a_batch_that_is_being_computed(feed, ahead):
    ahead.expect([(2, 0)])
    assert feed.begun.acquire(timeout=10)
    threading.Timer(0.05, feed.gate.release).start()
    assert value(ahead, 2, 0) == 20
    assert len(feed.made) == 1


def test_take_works_after_close(feed, ahead):
    ahead.close()
    ahead.close()
    ahead.expect([(1, 1)])
    feed.gate.release(1)
    assert value(ahead, 1, 1) == 11
    assert feed.made[0][2] == "MainThread"


def test_a_forked_process_begins_anew(feed, ahead):
    ahead.expect([(0, 0)])
    assert feed.begun.acquire(timeout=10)
    child = os.fork()
    if child == 0:
        feed.gate.release(8)
        ahead.expect([(0, 0), (0, 1)])
        good = value(ahead, 0, 0) == 0 and value(ahead, 0, 1) == 1 and value(ahead, 7, 0) == 70
        ahead.close()
        os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_feeds_that_use_generators_are_computed_by_the_taker():
    threads = []

    class Watched(list):
        def __getitem__(self, number):
            threads.append(threading.current_thread().name)
            return super().__getitem__(number)

    for is_random, name in ((True, "MainThread"), (False, "argosy-ahead")):
        source = as_source(Watched([1, 2, 3]), is_random=is_random)
        threads.clear()
        with Ahead(source.feed(1)) as ahead:
            ahead.expect([(0, 0)])
            wait_ready(ahead, 0 if is_random else 1)
            ahead.take(0, 0)
        assert threads == [name]


def steps_ahead(trial, count, seconds):
    """Of so many steps, which were made ahead, when the caller needs `seconds` for each of two batches."""
    found = []
    for _ in range(count):
        found.append(trial.is_ahead())
        if not found[-1]:
            trial.add(seconds)
            trial.add(seconds)
    return found


def test_quick_batches_are_left_to_the_caller_after_a_trial():
    trial = Trial()
    assert steps_ahead(trial, 4, QUICK_SECONDS / 2) == [True] * 4
    assert steps_ahead(trial, 50, QUICK_SECONDS / 2) == [False] * 50
    assert steps_ahead(trial, 6, QUICK_SECONDS * 2) == [False, True, True, True, True, False]


def test_slow_batches_are_tried_less_and_less_often():
    trial = Trial()
    found = steps_ahead(trial, 200, QUICK_SECONDS * 2)
    assert [place for place, ahead in enumerate(found) if not ahead] == [4, 9, 18, 35, 68, 133]


@pytest.mark.parametrize(("limit", "name"), [(3600.0, "MainThread"), (-1.0, "argosy-ahead")])
def test_who_makes_a_batch_is_settled_by_its_time(monkeypatch, limit, name):
    monkeypatch.setattr(prefetch, "QUICK_SECONDS", limit)
    feed = Gated()
    feed.gate.release(100)
    with Ahead(feed, depth=2) as ahead:
        for index in range(12):
            ahead.expect([(each, lane) for each in (index, index + 1) for lane in (0, 1)])
            assert [value(ahead, index, lane) for lane in (0, 1)] == [index * 10, index * 10 + 1]
        ahead.expect([(50, 0)])
        if limit < 0:
            wait_ready(ahead, 1)
        assert value(ahead, 50, 0) == 500
    assert (50, 0, name) in feed.made


def test_an_error_of_a_quick_batch_is_raised_where_it_is_taken(monkeypatch):
    monkeypatch.setattr(prefetch, "QUICK_SECONDS", 3600.0)
    feed = Gated()
    feed.gate.release(100)
    with Ahead(feed, depth=2) as ahead:
        for _ in range(6):
            ahead.expect([])
        ahead.expect([(-1, 0), (-1, 1), (0, 0)])
        with pytest.raises(ValueError, match="no batch -1"):
            ahead.take(-1, 0)
        ahead.expect([(1, 0), (1, 1), (2, 0)])
        assert [made[:2] for made in feed.made[-2:]] == [(1, 0), (1, 1)]
        assert [value(ahead, 1, lane) for lane in (0, 1)] == [10, 11]
        assert len(feed.made) == 4
