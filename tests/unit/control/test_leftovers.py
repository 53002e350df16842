"""Nothing of a cluster that is down stays in the temporary directory, and nobody is led astray by what goes."""

import fcntl
import os
import threading

import pytest

from argosy.control import submission
from argosy.control.home import open_cluster


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    cluster = open_cluster({"ARGOSY_HOME": str(tmp_path / "h"), "XDG_RUNTIME_DIR": str(tmp_path)})
    for part in ("keeper", "controller", "agent"):
        with open(cluster.lock(part), "w"):
            pass
    return cluster


def test_locks_and_their_directory_go_with_the_cluster(cluster):
    submission.sweep_leftovers(cluster)
    assert not os.path.exists(cluster.runtime)
    submission.sweep_leftovers(cluster)
    assert not os.path.exists(cluster.runtime)


def test_the_lock_of_a_part_that_is_still_there_stays(cluster):
    with open(cluster.lock("agent")) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        submission.sweep_leftovers(cluster)
        assert os.path.exists(cluster.lock("agent"))
        assert os.path.exists(cluster.lock("up"))


def test_who_waited_for_a_lock_that_was_removed_holds_the_new_one(cluster):
    is_held, may_end = threading.Event(), threading.Event()

    def wait():
        with submission._locked(cluster):
            is_held.set()
            may_end.wait(10)

    with submission._locked(cluster):
        waiter = threading.Thread(target=wait)
        waiter.start()
        submission._remove_locks(cluster)
        assert not is_held.is_set()
    assert is_held.wait(10)
    with open(cluster.lock("up")) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    may_end.set()
    waiter.join(10)
