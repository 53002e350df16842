"""A generation that follows another, whose ranks were killed in a save, on the store of torch.distributed that both have used."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from argosy.checkpoint import Checkpointer, Writing, checkpointer
from argosy.checkpoint.background import Background
from argosy.checkpoint.writer.client import wait_gone

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def generation(forked, tmp_path):
    def run(number, body):
        def join(rank, directory):
            torch.set_num_threads(1)
            store = dist.FileStore(str(tmp_path / "kept"), 2)
            dist.init_process_group("fake", store=store, rank=rank, world_size=2)

        return forked(2, lambda rank, _: body(rank), join, f"generation{number}")

    return run


def state_of(rank):
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.fill_(1.0)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_was_killed_while_it_copied_delays_nobody_and_its_words_are_not_taken(
    generation, tmp_path
):
    path = tmp_path / "store"

    def dies(rank):
        checkpointer = Checkpointer(path)
        state = state_of(rank)
        checkpointer.load(state)
        checkpointer.save(1, state)
        if rank == 1:
            Background._hand_over = killed
        handle = checkpointer.save(2, state, wait=False)
        handle.wait("staged")
        killed()

    def goes_on(rank):
        state = state_of(rank)
        with Checkpointer(path) as checkpointer:
            loaded = checkpointer.load(state)
            checkpointer.save(2, state)
            return loaded.step

    assert generation(1, dies) == [{"status": 9}, {"status": 9}]
    results = generation(2, goes_on)
    assert [one.get("result") for one in results] == [1, 1], results
    assert Checkpointer(path).catalogue.verify(2).faults == []
    assert wait_gone(path, 10)
    assert not [name for name in os.listdir(path) if name.startswith(".staging")]


def test_what_both_had_handed_over_is_waited_for(generation, tmp_path):
    path = tmp_path / "store"
    slow = Writing(bytes_per_second=1e6)

    def large():
        return {"x": torch.ones(500_000), "y": torch.ones(500_000)}

    def dies(rank):
        handle = Checkpointer(path, writing=slow).save(1, large(), wait=False)
        handle.wait("staged")
        killed()

    def goes_on(rank):
        with Checkpointer(path) as checkpointer:
            return checkpointer.load(large()).step

    assert generation(1, dies) == [{"status": 9}, {"status": 9}]
    assert not (path / "step-000000001").exists(), "it takes seconds longer than one is given up in"
    results = generation(2, goes_on)
    assert [one.get("result") for one in results] == [1, 1], results
    assert wait_gone(path, 10)


def test_what_a_writer_that_hangs_has_of_them_is_not_waited_for(
    generation, tmp_path, monkeypatch, halt
):
    monkeypatch.setattr(checkpointer, "PATIENT_SECONDS", 2.0)
    path, told = tmp_path / "store", tmp_path / "told"

    def dies(rank):
        first = Checkpointer(path)
        first.save(1, state_of(rank))
        slow = Checkpointer(path, writing=Writing(bytes_per_second=1e4))
        first.close()
        slow.save(2, state_of(rank), wait=False).wait("staged")
        if rank == 1:
            told.touch()  # the writer has answered this rank, too
        else:
            deadline = time.monotonic() + 60
            while not told.exists():
                assert time.monotonic() < deadline
                time.sleep(0.005)
            halt(slow._deliveries.writer.writer_pid)
        killed()

    def goes_on(rank):
        with Checkpointer(path) as second:
            loaded = second.load(state_of(rank))
            second.save(2, state_of(rank))
            return loaded.step

    assert generation(1, dies) == [{"status": 9}, {"status": 9}]
    results = generation(2, goes_on)
    assert [one.get("result") for one in results] == [1, 1], results
    assert Checkpointer(path).catalogue.verify(2).faults == []
