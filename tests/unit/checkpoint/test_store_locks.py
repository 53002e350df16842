"""Who has the lock of a store, and until when."""

import os

import pytest

from argosy.checkpoint.commits import Store
from argosy.errors import ConfigError


@pytest.fixture
def stores(tmp_path):
    """Two sessions of one directory."""
    found = [Store(tmp_path), Store(tmp_path)]
    yield found
    for store in found:
        store.close()


def test_a_closed_store_is_free_though_a_child_that_is_being_started_has_the_descriptor(stores):
    first, second = stores
    first.lock("first")
    copy = os.dup(first._lock)  # as a fork has it until it is another program
    with pytest.raises(ConfigError, match=rf"by process {os.getpid()} of host .* \(run first\)"):
        second.lock("second")
    first.close()
    second.lock("second")
    os.close(copy)


def test_a_lock_that_is_lent_is_held_until_both_have_let_go(stores):
    first, second = stores
    first.lock("first")
    copy = os.dup(first.lend_lock(".staging-1"))
    first.close()
    with pytest.raises(ConfigError, match="first"):
        second.lock("second")
    os.close(copy)
    second.lock("second")


def test_a_lock_that_came_back_is_free_though_a_child_has_a_copy(stores):
    first, second = stores
    first.lock("first")
    copy = os.dup(first.lend_lock(".staging-1"))
    first.lock_came_back(".staging-1")
    first.close()
    second.lock("second")
    os.close(copy)


def test_a_fork_that_closes_its_copy_does_not_free_the_store(stores):
    first, second = stores
    first.lock("first")
    child = os.fork()
    if not child:
        first.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ConfigError, match="first"):
        second.lock("second")
