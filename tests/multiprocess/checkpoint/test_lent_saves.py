"""A state in memory that was lent is saved from where it lies by the writer process, which finishes and holds it though its owner is killed."""

import fcntl
import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from argosy.checkpoint import Checkpointer, Writing, names, sockets
from argosy.checkpoint.directio import Files
from argosy.checkpoint.lending import Loan, Memory
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.writer import client
from argosy.checkpoint.writer.client import WriterLost, ask, wait_gone
from argosy.move import arenas

pytestmark = pytest.mark.multiprocess

SLOW = Writing(bytes_per_second=24e6)
COUNT = 6_000_000


@pytest.fixture
def arena():
    with arenas.create("lent", 64 << 20) as found:
        yield found


def loan_of(arena, *holds):
    return Loan((Memory(arena.fileno(), arena.address, arena.memory.nbytes),), holds)


def large(arena, step):
    return arena.empty((COUNT,), torch.float32, name="x").fill_(float(step))


def held(arena):
    """A lock on the arena's memory that other processes see."""
    descriptor = os.open(f"/proc/self/fd/{arena.fileno()}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def held_soon(arena):
    """The same when a process that was just killed has let go."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return held(arena)
        except BlockingIOError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_was_lent_and_what_lies_elsewhere_is_saved_as_it_is(tmp_path, arena):
    state = {
        "lent": torch.arange(COUNT, dtype=torch.float32, out=large(arena, 0)),
        "other": torch.arange(70_000).reshape(700, 100),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "word": "text",
    }
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save_lent(3, state, loan_of(arena), metrics={"loss": 2.0})
        assert handle.wait(timeout=60) == tmp_path / "step-000000003"
        assert handle.how == "lent"
        assert ask(tmp_path) == []
        assert "writer_seconds" in handle.statistics(), "the writer process has written it"
        # Unchanged files are linked, as in any other save.
        checkpointer.save_lent(4, state, loan_of(arena)).wait(timeout=60)
        assert checkpointer.catalogue.verify(3).faults == []
        assert checkpointer.catalogue.verify(4).faults == []
        room = {
            key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else None
            for key, one in state.items()
        }
        loaded = checkpointer.load(room, 4, streams=False)
    assert loaded.step == 4
    for key, one in state.items():
        if isinstance(one, torch.Tensor):
            assert torch.equal(room[key], one), key
    assert wait_gone(tmp_path, 10)


def test_a_killed_owner_s_save_is_finished_and_its_hold_kept_until_then(tmp_path, arena):
    x = large(arena, 2)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            signal.alarm(60)
            torch.set_num_threads(1)
            checkpointer = Checkpointer(tmp_path, writing=SLOW)
            handle = checkpointer.save_lent(2, {"x": x}, loan_of(arena, held(arena)))
            handle.wait("staged")
            os.write(writing, b"n" if handle.is_done else b"y")
            signal.pause()
        finally:
            os._exit(70)
    os.close(writing)
    assert os.read(reading, 1) == b"y"
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises(BlockingIOError):
        os.close(held(arena))
    assert not (tmp_path / "step-000000002").exists()
    descriptor = os.open(f"/proc/self/fd/{arena.fileno()}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    # Who holds it next finds the store free.
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer._opened_store().lock("next", patience_seconds=0.0)
        found = torch.zeros(COUNT)
        assert checkpointer.load({"x": found}).step == 2
    os.close(descriptor)
    assert torch.equal(found, torch.full((COUNT,), 2.0))
    assert Listing(tmp_path).steps() == [2]
    assert wait_gone(tmp_path, 10)


def test_a_killed_writer_is_the_handle_s_error_and_the_next_save_has_another(tmp_path, arena):
    x = large(arena, 1)
    with Checkpointer(tmp_path, writing=SLOW) as checkpointer:
        handle = checkpointer.save_lent(1, {"x": x}, loan_of(arena))
        handle.wait("staged", timeout=30)
        while not (found := ask(tmp_path)):
            assert not handle.is_done
        assert found == [(1, found[0][1], handle.total_bytes)]
        os.kill(checkpointer._deliveries.writer.writer_pid, signal.SIGKILL)
        with pytest.raises(WriterLost):
            handle.wait(timeout=30)
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".staging")]
        checkpointer.save_lent(2, {"x": x}, loan_of(arena)).wait(timeout=30)
        assert checkpointer.steps() == [2]
        assert checkpointer.catalogue.verify(2).faults == []
    assert wait_gone(tmp_path, 10)


def test_a_writer_that_hangs_is_the_handle_s_error_when_its_time_is_over(tmp_path, arena, halt):
    x, hold = large(arena, 1), held(arena)
    brief = Writing(bytes_per_second=24e6, deadline_seconds=2.0)
    with Checkpointer(tmp_path, writing=brief) as checkpointer:
        handle = checkpointer.save_lent(1, {"x": x}, loan_of(arena, hold))
        handle.wait("staged", timeout=30)
        pid = checkpointer._deliveries.writer.writer_pid
        halt(pid)
        try:
            with pytest.raises(WriterLost, match=f"{pid} has said nothing for . s") as caught:
                handle.wait(timeout=60)
            assert f"kill -9 {pid}" in caught.value.fix
            os.close(hold)
            with pytest.raises(BlockingIOError):
                os.close(held(arena))
            assert not [name for name in os.listdir(tmp_path) if name.startswith(".staging")]
        finally:
            os.kill(pid, signal.SIGKILL)
        checkpointer.save_lent(2, {"x": x}, loan_of(arena)).wait(timeout=30)
        assert checkpointer.steps() == [2]
    assert wait_gone(tmp_path, 10)


def test_without_a_writer_this_process_saves_what_was_lent(tmp_path, arena):
    class Own(Files):
        pass

    x = large(arena, 5)
    with Checkpointer(tmp_path, writing=Writing(files=Own())) as checkpointer:
        handle = checkpointer.save_lent(5, {"x": x}, loan_of(arena))
        assert handle.is_done
        assert checkpointer.catalogue.verify(5).faults == []
    assert not [name for name in os.listdir(tmp_path) if "sock" in name]


TRAINS = """
import os
import signal
import time

import torch
import argosy as ar
from argosy.checkpoint import Keep, Writing


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, place):
        return {"x": torch.full((4,), float(place))}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.table = torch.nn.Parameter(torch.ones(4_000_000))
        self.frozen = torch.nn.Parameter(torch.arange(1_000_000.0), requires_grad=False)

    def forward(self, x):
        return self.layer(x) * self.table.mean()


def loss(model, batch):
    return model(batch.x).sum(), batch.x.shape[0]


def main(run):
    trainer = run.trainer(
        model=Model(),
        data=Rows(),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6, momentum=0.9),
        batch_size=8,
        lanes=2,
        recovery="COPIED" not in os.environ,
        checkpoints=ar.Checkpoints(
            every=2,
            keep=Keep(last=99),
            writing=Writing(
                bytes_per_second=float(os.environ.get("RATE", 40e6)),
                deadline_seconds=float(os.environ.get("DEADLINE", 3600)),
            ),
        ),
    )
    saver, marker = trainer.parts.saver, run.directory / "killed"
    told = saver.listener

    def hear(event):
        if event.what == "staged" and event.step == 2 and not marker.exists():
            marker.write_text(str((saver.path / "step-000000002").exists()))
            writer = saver.checkpointer._deliveries.writer.writer_pid
            (run.directory / "writer").write_text(str(writer))
            sent = getattr(signal, os.environ.get("WRITER", "SIGKILL"))
            os.kill(writer if "WRITER" in os.environ else os.getpid(), sent)
            if "DIES" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
        told(event)

    saver.listener = hear
    for number, step in enumerate(trainer.steps(int(os.environ.get("STEPS", 8)))):
        step()
        if marker.exists() and number > 3:
            (run.directory / "went-on").touch()
        while "WRITER" in os.environ and "GOES_ON" not in os.environ and saver.is_saving:
            time.sleep(0.001)


if __name__ == "__main__":
    ar.launch(main)
"""


def test_a_save_that_a_killed_rank_has_begun_is_finished_beside_training(argosy):
    run = argosy.detach("-n", "2", argosy.script("trains.py", TRAINS))
    ended = argosy.wait_ended(run)
    assert ended["outcome"] == "succeeded", argosy("why", run).stdout
    directory = ended["directory"]
    with open(f"{directory}/killed") as marker:
        assert marker.read() == "False", "it was not written yet when its rank was killed"
    with Checkpointer(f"{directory}/checkpoints") as checkpointer:
        assert {2, 8} <= set(checkpointer.steps())
        for step in checkpointer.steps():
            assert checkpointer.catalogue.verify(step).faults == []
        with checkpointer.open(2) as opened:
            assert torch.equal(opened.tensor("frozen").read(), torch.arange(1_000_000.0))


def test_a_stop_that_waits_for_a_dead_rank_s_save_says_how_far_it_is(argosy):
    script = argosy.script("trains.py", TRAINS)
    settings = ["RATE=4e6", "STEPS=1000000"]
    run = argosy.detach("-n", "2", *(word for one in settings for word in ("--env", one)), script)
    marker = Path(argosy.view(run)["directory"]) / "killed"
    argosy.wait_until(marker.exists, lambda: argosy("logs", run, check=False).stdout)
    argosy("stop", run)
    assert Checkpointer(marker.with_name("checkpoints")).steps()[0] == 2
    told = [f for f in argosy.facts(run) if f["kind"] == "attempt.saving" and f["step"] == 2]
    assert told, argosy("events", run).stdout
    assert 0 < told[0]["num_bytes"] < told[0]["total_bytes"]


def test_a_lost_writer_costs_one_save_of_a_training_and_no_other(argosy):
    script = argosy.script("trains.py", TRAINS)
    run = argosy.detach("-n", "1", "--env", "WRITER=SIGKILL", script)
    ended = argosy.wait_ended(run)
    assert ended["outcome"] == "succeeded", argosy("why", run).stdout
    warned = [f["text"] for f in argosy.facts(run) if f.get("level") == "warning"]
    assert any(text.startswith("step 2 was not saved: the writer process") for text in warned)
    with Checkpointer(f"{ended['directory']}/checkpoints") as checkpointer:
        assert checkpointer.steps() == [4, 6, 8]
        for step in checkpointer.steps():
            assert checkpointer.catalogue.verify(step).faults == []


def test_a_writer_that_hangs_costs_a_training_neither_its_end_nor_its_last_step(argosy):
    script = argosy.script("trains.py", TRAINS)
    settings = ["WRITER=SIGSTOP", "DEADLINE=2", "STEPS=5"]
    run = argosy.detach("-n", "1", *(word for one in settings for word in ("--env", one)), script)
    try:
        ended = argosy.wait_ended(run)
    finally:
        directory = Path(argosy.view(run)["directory"])
        if (directory / "writer").exists():
            os.kill(int((directory / "writer").read_text()), signal.SIGKILL)
    assert ended["outcome"] == "succeeded", argosy("why", run).stdout
    warned = [f["text"] for f in argosy.facts(run) if f.get("level") == "warning"]
    assert any("has said nothing for" in text and "kill -9" in text for text in warned), warned
    with Checkpointer(directory / "checkpoints") as checkpointer:
        assert checkpointer.steps() == [5]
        assert checkpointer.catalogue.verify(5).faults == []


@pytest.mark.parametrize("case", ["PINNED", "COPIED", "DIES"])
def test_a_stop_does_not_wait_for_a_writer_that_hangs_and_loses_no_step(argosy, case):
    script = argosy.script("trains.py", TRAINS)
    settings = ["WRITER=SIGSTOP", "GOES_ON=1", "STEPS=1000000", f"{case}=1"]
    run = argosy.detach("-n", "2", *(word for one in settings for word in ("--env", one)), script)
    directory = Path(argosy.view(run)["directory"])
    went_on = directory / "went-on"
    argosy.wait_until(went_on.exists, lambda: argosy("logs", run, check=False).stdout)
    argosy("stop", run)
    facts = argosy.facts(run)
    killed = [f for f in facts if f["kind"] == "attempt.exited" and f.get("signal") == 9]
    assert len(killed) == (case == "DIES"), facts
    with pytest.raises(ProcessLookupError):
        os.kill(int((directory / "writer").read_text()), 0)
    with Checkpointer(directory / "checkpoints") as checkpointer:
        (step,) = checkpointer.steps()
        assert step > 2
        assert checkpointer.catalogue.verify(step).faults == []


def test_a_writer_that_hangs_is_killed_by_the_next_save_which_has_another(
    tmp_path, arena, monkeypatch, caplog, halt
):
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 1.0)
    x = large(arena, 1)
    with Checkpointer(tmp_path, writing=SLOW) as checkpointer:
        handle = checkpointer.save_lent(1, {"x": x}, loan_of(arena))
        handle.wait("staged", timeout=30)
        pid = checkpointer._deliveries.writer.writer_pid
        halt(pid)
        assert ask(tmp_path, 0.1) is None
        checkpointer.give_writer_up()
        with pytest.raises(WriterLost, match=f"{pid} hangs") as caught:
            handle.wait(timeout=60)
        assert f"kill -9 {pid}" in caught.value.fix
        checkpointer.save_lent(2, {"x": x}, loan_of(arena)).wait(timeout=60)
        assert (
            f"the writer process {pid} of {tmp_path} does not answer: it was killed" in caplog.text
        )
        assert checkpointer._deliveries.writer.writer_pid not in (0, pid)
        assert checkpointer.steps() == [2]
        assert checkpointer.catalogue.verify(2).faults == []
    assert wait_gone(tmp_path, 10)


def test_a_writer_that_is_silent_and_does_not_answer_is_killed_and_gives_back_what_it_holds(
    tmp_path, arena, monkeypatch, halt
):
    monkeypatch.setattr(client, "_START_SECONDS", 1.0)
    monkeypatch.setattr(client, "_ANSWER_SECONDS", 0.5)
    x, hold = large(arena, 1), held(arena)
    with Checkpointer(tmp_path, writing=SLOW) as checkpointer:
        handle = checkpointer.save_lent(1, {"x": x}, loan_of(arena, hold))
        handle.wait("staged", timeout=30)
        os.close(hold)
        pid = checkpointer._deliveries.writer.writer_pid
        halt(pid)
        with pytest.raises(WriterLost, match=f"{pid} has ended in the middle"):
            handle.wait(timeout=60)
        os.close(held(arena))
    assert client.end_hung(tmp_path) == 0


def test_a_writer_that_hangs_before_it_has_a_job_is_killed_and_gives_back_what_it_was_given(
    tmp_path, arena, monkeypatch, halt
):
    x = large(arena, 1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_lent(1, {"x": x}, loan_of(arena)).wait(timeout=60)
        pid = checkpointer._deliveries.writer.writer_pid
        halt(pid)
        monkeypatch.setattr(client, "_START_SECONDS", 1.0)
        hold = held(arena)
        handle = checkpointer.save_lent(2, {"x": x}, loan_of(arena, hold))
        os.close(hold)
        with pytest.raises(WriterLost, match=f"{pid} did not answer: it was killed"):
            handle.wait(timeout=60)
        monkeypatch.undo()
        os.close(held_soon(arena))
        checkpointer.save_lent(3, {"x": x}, loan_of(arena)).wait(timeout=60)
        assert checkpointer.steps() == [1, 3]
    assert wait_gone(tmp_path, 10)


def test_one_that_accepts_nobody_any_more_hangs_too_and_its_number_is_not_guessed(tmp_path):
    directory = os.open(tmp_path, os.O_RDONLY)
    listener = sockets.listen(directory, names.socket_name(socket.gethostname()))
    listener.listen(0)
    with socket.socket(socket.AF_UNIX) as first:
        sockets.connect(first, tmp_path, names.socket_name(socket.gethostname()))
        assert ask(tmp_path, 0.05) is None
        assert client.end_hung(tmp_path) == 0
        assert "kill -9" not in client._mend(0)
    listener.close()
    os.close(directory)
