"""The benchmark of saves beside training: waits count, a torn save fails its side, a peer that is not there gives null."""

import importlib.util
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from benchmarks import checkpoint
from benchmarks.measure import PROGRAMS, SideFailed


@pytest.fixture(scope="module")
def tasks():
    spec = importlib.util.spec_from_file_location("tasks", PROGRAMS / "checkpoint_task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def task(tasks, monkeypatch):
    monkeypatch.setattr(tasks, "WIDTH", 8)
    return tasks.Task(0)


def test_the_wait_for_the_lock_is_part_of_the_stall(tasks, task):
    is_staged, before = threading.Event(), task.waited_seconds

    @contextmanager
    def lock():
        is_staged.wait()
        yield

    def save():
        task.lock = lock
        threading.Timer(0.05, is_staged.set).start()
        return tasks.Saving(is_staged.is_set, lambda: task.waited_seconds - before)

    begun = time.perf_counter()
    found = tasks.one_turn(task.step, save)
    assert 0 < task.waited_seconds - before <= found["stall"] <= time.perf_counter() - begun


def test_a_save_that_shares_memory_with_the_state_is_found_torn(tasks, task):
    def side(copied):
        kept = {}

        def save():
            for name, value in task.tensors().items():
                kept[name] = value.clone() if copied else value
            return tasks.Saving(lambda: True, lambda: 0.0)

        def load():
            with torch.no_grad():
                for name, value in task.tensors().items():
                    value.copy_(kept[name])

        return save, load

    assert tasks.find_wrong(task, *side(copied=True)) == []
    assert "0.weight" in tasks.find_wrong(task, *side(copied=False))


def test_a_peer_that_is_not_there_is_null_with_the_reason(monkeypatch):
    def absent(name):
        raise SideFailed(f"{name} is not there")

    monkeypatch.setattr(checkpoint, "peer_python", absent)
    found = checkpoint.run(quick=True, only="peer")
    assert found["stall_over_torch_checkpointing"] is None
    assert found["notes"] == {"peer": "torch_checkpointing is not there"}


class Side:
    """A team of one that answers from a list."""

    def __init__(self, name, *answers):
        self.name = name
        self.answers = list(answers)

    def wait_ready(self):
        pass

    def ask(self, line):
        assert line == "save"
        return self.answers.pop(0)


def test_the_first_turn_of_each_side_only_warms_up():
    def turns(*stalls):
        return [{"stall": one, "lost": 2 * one, "usual": 1.0} for one in stalls]

    ours, peer = Side("ours", *turns(9, 1, 2)), Side("peer", *turns(90, 10, 20))
    stalls, losses = checkpoint.in_turns(ours, peer, 2)
    assert stalls == {"ours": [1, 2], "peer": [10, 20]}
    assert losses == {"ours": [2, 4], "peer": [20, 40]}


def test_the_programs_of_peers_import_nothing_of_ours():
    for name in ("checkpoint_task.py", "checkpoint_peer.py"):
        assert "argosy" not in Path(PROGRAMS / name).read_text()
