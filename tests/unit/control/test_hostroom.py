"""Whether a host can hold a large run."""

from __future__ import annotations

import io
import os
import resource

import pytest

from argosy.control import hostroom
from argosy.control.hostroom import find_shortage, find_unusable
from argosy.control.keeper import containment


@pytest.fixture
def roomy(monkeypatch):
    """A host with room for everything; each test takes one thing away."""
    monkeypatch.setattr(hostroom, "_num_tasks", lambda: 100)
    monkeypatch.setattr(hostroom, "_read_number", lambda path: 1 << 22)
    monkeypatch.setattr(hostroom, "process_limits", list)
    monkeypatch.setattr(hostroom, "_descriptors", lambda pid: (1 << 20, 10))
    monkeypatch.setattr(hostroom, "_free_memory", lambda: 64 << 30)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_cpus_are_tried_and_the_thread_stays_where_it_was():
    before = os.sched_getaffinity(0)
    assert find_unusable([*before, 99_999, 1 << 40]) == [99_999, 1 << 40]
    assert os.sched_getaffinity(0) == before


def test_a_few_processes_fit_on_this_machine():
    assert find_shortage(8, 8, os.getpid()) is None


def test_thousands_fit_where_nothing_is_scarce(roomy):
    assert find_shortage(9_000, 999, 1) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_read_number", lambda path: 5000, "room for 4836 more: kernel.pid_max is 5000, 100 in"),
        ("process_limits", lambda: [("/cg/pids.max", 2000, 5)], "1931 more: /cg/pids.max is 2000"),
        ("_descriptors", lambda pid: (4096, 100), "room for 3932 more: the keeper's limit of open"),
        ("_free_memory", lambda: 1 << 30, "at least 2.4 GiB of memory, 1.0 GiB are available"),
    ],
)
def test_what_is_scarce_is_named_with_what_can_be_done(roomy, monkeypatch, name, value, words):
    monkeypatch.setattr(hostroom, name, value)
    shortage = find_shortage(9_999, 0, 1)
    assert words in shortage.what
    assert shortage.fix


def test_a_process_is_certain_to_cost_the_keeper_one_descriptor_and_no_more(roomy, monkeypatch):
    monkeypatch.setattr(hostroom, "_descriptors", lambda pid: (256, 16))
    assert find_shortage(100, 76, 1) is None
    shortage = find_shortage(100, 77, 1)
    assert shortage.what.endswith("the keeper's limit of open files is 256, 16 in use")


def test_swap_is_memory_that_can_be_had(monkeypatch):
    lines = "MemTotal: 9 kB\nMemAvailable: 100 kB\nHugePages_Total: 0\nSwapFree: 28 kB\n"
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(lines))
    assert hostroom._free_memory() == 128 << 10


def test_the_limit_of_a_user_counts_unless_it_is_root(roomy, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (500, 500))
    monkeypatch.setattr(hostroom, "_num_own_tasks", lambda: 36)
    assert find_shortage(1000, 0, 1) is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "room for 400 more: the limit of processes of this user" in find_shortage(401, 0, 1).what
    assert find_shortage(400, 0, 1) is None


def test_interpreters_need_more_memory_than_commands(roomy, monkeypatch):
    monkeypatch.setattr(hostroom, "_free_memory", lambda: 4 << 30)
    assert find_shortage(1000, 0, 1) is None
    assert "use at most 512 processes" in find_shortage(0, 1000, 1).fix


def test_own_tasks_are_processes_and_threads():
    assert hostroom._num_own_tasks() >= len(os.listdir("/proc/self/task"))


def test_limits_of_all_cgroups_around_this_process_count(tmp_path, monkeypatch):
    inner = tmp_path / "mount" / "outer" / "inner"
    inner.mkdir(parents=True)
    for path, most in ((inner, "max\n"), (inner.parent, "300\n"), (inner.parent.parent, None)):
        (path / "cgroup.procs").write_text("")
        if most is not None:
            (path / "pids.max").write_text(most)
            (path / "pids.current").write_text("7\n")
    monkeypatch.setattr(containment, "_unified_directory", lambda: str(inner))
    monkeypatch.setattr(containment, "_controller_directory", lambda name: None)
    assert containment.process_limits() == [(f"{inner.parent}/pids.max", 300, 7)]
