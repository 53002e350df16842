"""The writer process outlives the ranks and finishes what they staged; its own death is an error, and nothing that was there is lost."""

import os
import random
import signal
import time

import pytest
import torch

from argosy.checkpoint import Checkpointer, Writing
from argosy.checkpoint.boards import FileBoard, Group
from argosy.checkpoint.writer.client import WriterClient, WriterLost, wait_gone
from argosy.move.placements import Pieces

pytestmark = pytest.mark.multiprocess

SLOW = Writing(bytes_per_second=24e6)


def value(step):
    return torch.full((6_000_000,), float(step))


def small(step):
    return torch.full((70_000,), float(step))


def child_of(work):
    """A forked process that runs `work` and is killed by its parent; what it writes to the pipe is read by `told`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            signal.alarm(60)
            torch.set_num_threads(1)
            work(lambda number: os.write(writing, number.to_bytes(8, "little")))
            signal.pause()
        finally:
            os._exit(70)
    os.close(writing)
    return child, reading


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def number_from(reading):
    data = os.read(reading, 8)
    return int.from_bytes(data, "little") if data else None


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_staged_save_becomes_durable_though_its_trainer_is_killed(tmp_path, is_reaped):
    def work(tell):
        checkpointer = Checkpointer(tmp_path, writing=SLOW)
        checkpointer.save(1, {"x": value(1)})
        handle = checkpointer.save(2, {"x": value(2)}, wait=False)
        handle.wait("staged")
        assert not handle.is_done
        tell(os.getpid())

    child, reading = child_of(work)
    assert number_from(reading) == child
    os.kill(child, signal.SIGKILL)
    if is_reaped:
        os.waitpid(child, 0)
    os.close(reading)
    assert not (tmp_path / "step-000000002").exists()
    # Whoever comes next waits for it, and neither takes an older one nor sweeps it away.
    x = torch.zeros(6_000_000)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load({"x": x}).step == 2
        assert torch.equal(x, value(2))
        checkpointer.save(3, {"x": value(3)})
        assert checkpointer.catalogue.verify(2).faults == []
    if not is_reaped:
        os.waitpid(child, 0)
    assert wait_gone(tmp_path, 10)


def test_a_killed_writer_is_an_error_and_the_next_save_has_another(tmp_path):
    with Checkpointer(tmp_path, writing=SLOW) as checkpointer:
        checkpointer.save(1, {"x": value(1)})
        handle = checkpointer.save(2, {"x": value(2)}, wait=False)
        handle.wait("staged", timeout=30)
        killed = checkpointer._deliveries.writer.writer_pid
        assert killed
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(WriterLost, match=f"process {killed} has ended"):
            handle.wait(timeout=30)
        assert checkpointer.steps() == [1]
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".staging")]
        checkpointer.save(2, {"x": value(2)}, wait=False).wait(timeout=30)
        assert checkpointer.catalogue.verify(1).faults == []
        assert checkpointer.catalogue.verify(2).faults == []
    assert wait_gone(tmp_path, 10)


def test_ranks_of_a_host_share_a_writer_and_commit_one_checkpoint(tmp_path):
    whole = torch.arange(5_000_000.0).reshape(2, -1)

    def rank_of(rank, tell):
        group = Group(rank, 2, "together", FileBoard(tmp_path), seconds=30)
        with Checkpointer(tmp_path / "store", group=group) as checkpointer:
            own = whole[rank : rank + 1].clone()
            pieces = Pieces(whole.shape, [((rank, 0), own)])
            handles = []
            # Without waiting: the ranks hear at different times what is durable.
            for step in range(1, 5):
                own.copy_(whole[rank : rank + 1])
                handles.append(checkpointer.save(step, {"x": pieces}, wait=False))
                own.zero_()
            for handle in handles:
                handle.wait(timeout=30)
            tell(checkpointer._deliveries.writer.writer_pid)

    children = [child_of(lambda tell, rank=rank: rank_of(rank, tell)) for rank in range(2)]
    writers = [number_from(reading) for _, reading in children]
    for child, reading in children:
        kill(child)
        os.close(reading)
    assert writers[0] == writers[1] is not None
    with Checkpointer(tmp_path / "store") as checkpointer:
        assert checkpointer.steps() == [1, 2, 3, 4]
        for step in (1, 4):
            assert checkpointer.catalogue.verify(step).faults == []
            with checkpointer.open(step) as opened:
                assert torch.equal(opened.tensor("x").read(), whole)
    assert wait_gone(tmp_path / "store", 10)


def save_for_ever(path, first, tell):
    checkpointer = Checkpointer(path)
    for step in range(first, first + 10_000):
        checkpointer.save(step, {"x": small(step)}, wait=False).wait("staged")
        tell(step)


def test_kills_at_any_moment_lose_no_staged_step_and_leave_no_process(tmp_path):
    draw = random.Random(5)
    # Connected here too, the writer need not be started in every trial.
    other = WriterClient(tmp_path)
    other.connect()
    told = 0
    for trial in range(20):
        child, reading = child_of(lambda tell, first=told + 1: save_for_ever(tmp_path, first, tell))
        told = number_from(reading) or told
        time.sleep(draw.random() * 0.05)
        kill(child)
        while (step := number_from(reading)) is not None:
            told = step
        os.close(reading)
        is_writer_killed = trial % 7 == 6
        if is_writer_killed:
            writer = other.writer_pid
            assert writer
            os.kill(writer, signal.SIGKILL)
        x = torch.zeros(70_000)
        with Checkpointer(tmp_path) as checkpointer:
            loaded = checkpointer.load({"x": x})
        # With the writer at most the two that it had not written yet are gone.
        assert loaded.step >= (told - 2 if is_writer_killed else told)
        assert loaded.skipped == []
        assert torch.equal(x, small(loaded.step))
        told = loaded.step
        other.connect()
    other.close()
    assert wait_gone(tmp_path, 10)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(told + 1, {"x": small(1)})
    hidden = sorted(name for name in os.listdir(tmp_path) if name.startswith("."))
    assert hidden == [".sessions", ".writer"]
