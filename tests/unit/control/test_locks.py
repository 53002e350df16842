"""One holder of a lock at a time, also while lock files are removed."""

from __future__ import annotations

import fcntl
import os

import pytest

from argosy.control import locks
from argosy.control.keeper import sweep
from argosy.control.presence import take_lock


def take_by_part(directory):
    return take_lock(f"{directory}/keeper.lock", "part", patience_seconds=0.0)


TAKERS = [take_by_part, sweep.take_lock, lambda directory: locks.take(f"{directory}/keeper.lock")]


def test_a_lock_that_is_held_is_not_taken(tmp_path):
    path = str(tmp_path / "x.lock")
    held = locks.take(path)
    before = set(os.listdir("/proc/self/fd"))
    assert locks.take(path) is None
    assert set(os.listdir("/proc/self/fd")) <= before
    assert not os.get_inheritable(held)
    os.close(held)
    os.close(locks.take(path))


@pytest.mark.parametrize("take", TAKERS)
@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_file_that_is_removed_before_it_is_locked_is_no_lock(
    tmp_path, monkeypatch, take, is_made_anew
):
    """Two that open it, one before and one after its removal, would both hold a lock."""
    path = tmp_path / "keeper.lock"
    flock, removals = fcntl.flock, []

    def remove_first(descriptor, how):
        if not removals:
            removals.append(path.unlink())
            if is_made_anew:
                path.touch()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    descriptor = take(str(tmp_path))
    assert removals
    assert os.path.samestat(os.fstat(descriptor), os.stat(path))
    assert locks.take(str(path)) is None
    os.close(descriptor)


def test_the_lock_of_a_keeper_is_had_although_its_directory_goes_meanwhile(tmp_path, monkeypatch):
    runtime = tmp_path / "runtime"
    take, removals = locks.take, []

    def remove_first(path):
        if not removals:
            removals.append(runtime.rmdir())
        return take(path)

    monkeypatch.setattr(locks, "take", remove_first)
    descriptor = sweep.take_lock(str(runtime))
    assert removals
    assert (runtime / "keeper.lock").exists()
    os.close(descriptor)
