"""Saves beside training: never torn, equal to blocking ones, and what goes wrong is said and harms nothing that was there."""

import errno
import logging
import os
import random
import threading

import numpy
import pytest
import torch

from argosy.checkpoint import Checkpointer, Writing, deliveries, saving
from argosy.checkpoint.directio import Files
from argosy.checkpoint.gathering import TensorSource
from argosy.checkpoint.slots import SnapshotSlot
from argosy.checkpoint.snapshots import SnapshotTorn
from argosy.checkpoint.writer.client import WriterAbsent, WriterClient, wait_gone
from argosy.errors import ConfigError, HomeError, NoRoom, TimedOut


def trained():
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(300, 500), torch.nn.BatchNorm1d(500), torch.nn.Linear(500, 7)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "progress": {"epoch": 1}}
    train(state)
    return state


def train(state):
    state["model"](torch.randn(4, 300)).square().sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def contents(checkpointer, step):
    assert checkpointer.catalogue.verify(step).faults == []
    with checkpointer.open(step) as opened:
        values = {key: opened.value(key) for key in ("progress", "optimizer")}
        return {name: opened.tensor(name).read() for name in opened.names()}, values


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, tensor in one[0].items():
        assert torch.equal(tensor, other[0][name]), name


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One store for all tests, with a connection that keeps its writer process: starting one takes longer than most tests."""
    path = tmp_path_factory.mktemp("background") / "store"
    path.mkdir()
    keeping = WriterClient(path)
    keeping.connect()
    yield path
    keeping.close()
    assert wait_gone(path, 10)


@pytest.fixture
def base(store):
    """A step beyond all that are there; nothing half done is left behind it."""
    last = max(Checkpointer(store).steps(), default=0)
    yield last // 100 * 100 + 100
    assert not [name for name in os.listdir(store) if name.startswith(".staging")]


def steps_from(store, base):
    return [step - base for step in Checkpointer(store).steps() if step >= base]


@pytest.fixture
def held_slots(monkeypatch):
    """Copies begin only when the test says so."""
    let = threading.Event()
    create = SnapshotSlot.create

    def later(num_bytes):
        assert let.wait(20)
        return create(num_bytes)

    monkeypatch.setattr(SnapshotSlot, "create", later)
    yield let
    let.set()


@pytest.mark.parametrize("snapshot", ["auto", "blocking"])
def test_training_right_after_save_changes_nothing_in_it(store, base, snapshot, caplog):
    caplog.set_level(logging.INFO, logger="argosy.checkpoint")
    state = trained()
    events = []
    with Checkpointer(
        store, writing=Writing(snapshot=snapshot), listener=lambda event: events.append(event)
    ) as checkpointer:
        for step in (10, 30):
            checkpointer.save(base + step, state)
            handle = checkpointer.save(base + step + 1, state, wait=False)
            state["progress"]["epoch"] += 1
            train(state)
            assert handle.wait(timeout=30) == store / f"step-{base + step + 1:09d}"
            assert_same(
                contents(checkpointer, base + step + 1), contents(checkpointer, base + step)
            )
            assert handle.how == ("gated" if snapshot == "auto" else "blocking")
            assert handle.written_bytes == handle.total_bytes > 0
    for waited_or_not in (base + 30, base + 31):
        own = [event.what for event in events if event.step == waited_or_not]
        assert own == ["requested", "staged", "durable"]
    assert f"snapshots are {handle.how}" in caplog.text


@pytest.fixture
def held_plans(monkeypatch):
    """Saves are planned only when the test says so."""
    let = threading.Event()
    prepare = saving.prepare

    def later(*arguments):
        assert let.wait(30)
        return prepare(*arguments)

    monkeypatch.setattr(saving, "prepare", later)
    yield let
    let.set()


def test_what_changes_before_a_save_is_planned_is_saved_as_it_was(store, base, held_plans):
    state = trained()
    state["noise"] = torch.Generator().manual_seed(5)
    state["words"] = numpy.arange(3.0)
    tied = state["tied"] = {"weight": state["model"][0].weight, "own": torch.ones(2)}
    held_plans.set()
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, state)
        held_plans.clear()
        handle = checkpointer.save(base + 2, state, wait=False)
        assert (handle.how, handle.stage) == ("gated", "requested")
        state["model"](torch.randn(4, 300)).square().sum().backward()  # batch statistics change
        state["optimizer"].param_groups[0]["lr"] = 7.0
        state["optimizer"].state.clear()
        state["progress"]["epoch"] = 9
        tied["own"].zero_()
        state["words"][:] = 0
        random.random(), numpy.random.rand(), torch.rand(3, generator=state["noise"])
        del state["model"][2]
        held_plans.set()
        handle.wait()
        first, second = contents(checkpointer, base + 1), contents(checkpointer, base + 2)
        assert_same(first, second)
        with checkpointer.open(base + 1) as one, checkpointer.open(base + 2) as other:
            assert one.manifest.aliases == other.manifest.aliases
            assert torch.equal(other.value("tied")["weight"], first[0]["0.weight"])


def test_a_parameter_with_other_memory_before_it_is_planned_fails_the_save(store, base, held_plans):
    state = trained()
    with Checkpointer(store) as checkpointer:
        handle = checkpointer.save(base + 1, state, wait=False)
        weight = state["model"][0].weight
        weight.data = weight.data.clone()
        held_plans.set()
        with pytest.raises(SnapshotTorn, match="other memory"):
            handle.wait()
        train(state)
        checkpointer.save(base + 2, state, wait=False).wait()
    assert steps_from(store, base) == [2]


def test_weights_that_are_away_only_while_the_save_is_planned_fail_it(store, base, monkeypatch):
    state = trained()
    weight = state["model"][0].weight
    own, average = weight.data, torch.full_like(weight.data, 9.0)
    prepare = saving.prepare

    def in_between(store, facts, gather, *rest):
        weight.data = average
        try:
            return prepare(store, facts, gather, *rest)
        finally:
            weight.data = own

    with Checkpointer(store) as checkpointer:
        monkeypatch.setattr(saving, "prepare", in_between)
        handle = checkpointer.save(base + 1, state, wait=False)
        with pytest.raises(SnapshotTorn, match=r"0\.weight was given other memory"):
            handle.wait()
    assert steps_from(store, base) == []


def test_what_is_set_aside_is_tied_only_if_it_was_in_the_call(store, base, held_plans):
    state = trained()
    state["a"], state["b"] = torch.ones(3), torch.full((3,), 2.0)
    with Checkpointer(store) as checkpointer:
        handle = checkpointer.save(base + 1, state, wait=False)
        state["b"].data = state["a"].data
        state["model"][0].requires_grad_(False)
        held_plans.set()
        handle.wait()
        with checkpointer.open(base + 1) as opened:
            assert opened.tensor("b").read().tolist() == [2.0] * 3
            assert opened.manifest.aliases == {}
            assert opened.record("0.weight").kind == "model"


def test_memory_that_is_shared_with_counts_of_changes_of_its_own_is_saved(store, base):
    embedding = torch.nn.Embedding(7, 5, padding_idx=0)
    head = torch.nn.Linear(5, 7, bias=False)
    head.weight.data = embedding.weight.data
    assert head.weight._version != embedding.weight._version
    model = torch.nn.Sequential(embedding, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, state, wait=False).wait()
        views = {"weights": {"w": head.weight.data}, "optimizer": optimizer}
        checkpointer.save(base + 2, views, wait=False).wait()
    assert steps_from(store, base) == [1, 2]


def test_a_step_that_is_interrupted_while_it_helps_fails_the_save_and_holds_nothing_up(
    store, base, held_slots, monkeypatch
):
    state = trained()
    fill = TensorSource.fill
    main = threading.get_ident()

    def interrupted(source, duty, address):
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        helped.wait(20)
        return fill(source, duty, address)

    helped = threading.Event()
    monkeypatch.setattr(TensorSource, "fill", interrupted)
    with Checkpointer(store) as checkpointer:
        handle = checkpointer.save(base + 1, state, wait=False)
        held_slots.set()
        copy = checkpointer._background._gates.copy
        assert copy._is_ready.wait(20)
        copy._late.appendleft(copy._late[0])  # one for each thread, however few there are
        copy._left += 1
        with pytest.raises(KeyboardInterrupt):
            copy.help()
        helped.set()
        with pytest.raises(KeyboardInterrupt):
            handle.wait(timeout=20)
    assert steps_from(store, base) == []


def test_a_thread_that_cannot_be_had_fails_the_call_and_closes_no_gate(store, base, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    state = trained()
    with Checkpointer(store) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                checkpointer.save(base + 1, state, wait=False)
        train(state)
        checkpointer.save(base + 2, state, wait=False).wait()
    assert steps_from(store, base) == [2]


def test_a_save_is_planned_and_copied_while_another_is_written_by_this_process(store, base):
    let = threading.Event()

    class Slow(Files):
        def flush(self, descriptor):
            assert let.wait(30)
            super().flush(descriptor)

    state = trained()
    with Checkpointer(store, writing=Writing(files=Slow())) as checkpointer:
        first = checkpointer.save(base + 1, state, wait=False)
        train(state)
        second = checkpointer.save(base + 2, state, wait=False)
        train(state)
        assert not first.is_done
        let.set()
        second.wait()
    assert steps_from(store, base) == [1, 2]


def test_what_goes_wrong_in_a_plan_is_raised_by_the_handle_and_holds_nobody_up(
    store, base, monkeypatch
):
    def fail(*arguments):
        raise NoRoom("the disk has no room")

    state = trained()
    with Checkpointer(store) as checkpointer:
        monkeypatch.setattr(saving, "prepare", fail)
        handle = checkpointer.save(base + 1, state, wait=False)
        train(state)
        with pytest.raises(NoRoom):
            handle.wait(timeout=30)
        monkeypatch.undo()
        checkpointer.save(base + 2, state, wait=False).wait()
    assert steps_from(store, base) == [2]


def test_a_step_that_exists_is_refused_by_the_call(store, base):
    state = trained()
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, state)
        with pytest.raises(ConfigError, match="never overwritten"):
            checkpointer.save(base + 1, state, wait=False)


def test_the_optimizers_step_waits_until_everything_is_copied(store, base, held_slots):
    state = trained()
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, state)
        handle = checkpointer.save(base + 2, state, wait=False)
        stepped = threading.Event()

        def run():
            train(state)
            stepped.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert not stepped.wait(0.05)
        held_slots.set()
        thread.join(20)
        handle.wait(timeout=30)
        assert_same(contents(checkpointer, base + 1), contents(checkpointer, base + 2))


def test_a_parameter_changed_by_hand_fails_the_save_and_nothing_else(store, base, held_slots):
    state = trained()
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, state)
        handle = checkpointer.save(base + 2, state, wait=False)
        with torch.no_grad():
            state["model"][0].weight.add_(1)
        held_slots.set()
        with pytest.raises(SnapshotTorn, match=r"0\.weight was changed"):
            handle.wait(timeout=30)
        assert steps_from(store, base) == [1]
        checkpointer.save(base + 3, state, wait=False).wait(timeout=30)
        assert torch.equal(
            contents(checkpointer, base + 3)[0]["0.weight"], state["model"][0].weight
        )


def test_what_no_optimizer_guards_is_copied_before_save_returns(store, base):
    values = {"x": torch.arange(3_000_000.0), "y": torch.ones(5).expand(3, 5)}
    with Checkpointer(store) as checkpointer:
        handle = checkpointer.save(base + 1, values, wait=False)
        values["x"].zero_()
        assert handle.how == "blocking"
        handle.wait(timeout=30)
        with checkpointer.open(base + 1) as opened:
            assert torch.equal(opened.tensor("x").read(), torch.arange(3_000_000.0))
            assert torch.equal(opened.tensor("y").read(), torch.ones(3, 5))


def test_a_third_save_waits_for_the_first_and_all_become_durable(store, base):
    state = trained()
    with Checkpointer(store, writing=Writing(bytes_per_second=8e6)) as checkpointer:
        handles = []
        for step in range(1, 6):
            handles.append(checkpointer.save(base + step, state, wait=False))
            train(state)
        assert handles[2].is_done
    assert [handle.stage for handle in handles] == ["durable"] * 5
    assert steps_from(store, base) == [1, 2, 3, 4, 5]


def test_a_state_that_grows_gets_larger_memory(store, base):
    with Checkpointer(store) as checkpointer:
        for step, count in enumerate((10, 10, 3_000_000, 3_000_000, 20)):
            x = torch.full((count,), float(step))
            checkpointer.save(base + step, {"x": x}, wait=False).wait(timeout=30)
            with checkpointer.open(base + step) as opened:
                assert torch.equal(opened.tensor("x").read(), x)


def test_what_went_wrong_in_the_writer_is_raised_by_the_next_call(store, base):
    state = {"x": torch.ones(500)}
    checkpointer = Checkpointer(store, writing=Writing(deadline_seconds=1e-9))
    handle = checkpointer.save(base + 1, state, wait=False)
    while not handle.is_done:
        os.sched_yield()
    assert isinstance(handle.error, TimedOut)
    with pytest.raises(TimedOut, match="not written within"):
        checkpointer.save(base + 2, state, wait=False)
    checkpointer.close()
    assert steps_from(store, base) == []
    with Checkpointer(store) as other:
        assert other.save(base + 2, state, wait=False).wait(timeout=30).exists()


def test_a_save_that_this_process_writes_has_a_deadline_and_a_rate_too(store, base, monkeypatch):
    def absent(self):
        raise WriterAbsent("none here")

    late = Writing(deadline_seconds=1e-9)
    # The first block is free; the second would be due in months.
    slow = Writing(bytes_per_second=1.0, deadline_seconds=60.0)
    state = {"x": torch.ones(3_000_000)}
    monkeypatch.setattr(WriterClient, "connect", absent)
    for place, writing in enumerate((late, slow)):
        with Checkpointer(store, writing=writing) as checkpointer:
            with pytest.raises(TimedOut, match="not written within"):
                checkpointer.save(base + place, state)
            handle = checkpointer.save(base + place, state, wait=False)
            with pytest.raises(TimedOut, match="not written within"):
                handle.wait(timeout=30)
    assert steps_from(store, base) == []


def test_without_memory_for_a_snapshot_the_state_is_written_behind_the_gate(
    store, base, monkeypatch
):
    def refuse(num_bytes):
        raise NoRoom(f"{num_bytes} are too many")

    monkeypatch.setattr(SnapshotSlot, "create", refuse)
    state = trained()
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, state)
        handle = checkpointer.save(base + 2, state, wait=False)
        train(state)
        handle.wait(timeout=30)
        assert handle.how == "written in place"
        assert_same(contents(checkpointer, base + 1), contents(checkpointer, base + 2))


def test_without_a_writer_process_this_one_writes(store, base, monkeypatch):
    def absent(self):
        raise WriterAbsent("none here")

    monkeypatch.setattr(WriterClient, "connect", absent)
    state = trained()
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, state)
        handle = checkpointer.save(base + 2, state, wait=False)
        train(state)
        handle.wait(timeout=30)
        assert_same(contents(checkpointer, base + 1), contents(checkpointer, base + 2))


def test_a_disk_that_fails_beside_training_leaves_the_last_checkpoint(store, base):
    class Failing(Files):
        is_broken = False

        def write(self, descriptor, data, offset):
            if self.is_broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(descriptor, data, offset)

    files = Failing()
    state = trained()
    checkpointer = Checkpointer(store, writing=Writing(files=files))
    checkpointer.save(base + 1, state, wait=False).wait(timeout=30)
    files.is_broken = True
    checkpointer.save(base + 2, state, wait=False)
    with pytest.raises(HomeError, match="safetensors"):
        checkpointer.close()
    assert steps_from(store, base) == [1]


def test_closing_takes_the_hooks_away_and_keeps_no_thread_or_descriptor(store, base):
    state = trained()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, state, wait=False)
        assert state["optimizer"]._optimizer_step_pre_hooks
    assert not state["optimizer"]._optimizer_step_pre_hooks
    deadline = threading.Event()
    for _ in range(200):
        if threading.active_count() == threads:
            break
        deadline.wait(0.01)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_load_waits_for_the_save_that_is_under_way(store, base):
    state = trained()
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 4, state, wait=False)
        assert checkpointer.load(state).step == base + 4


def test_writing_is_public():
    assert Writing is deliveries.Writing


def test_the_memory_of_the_second_slot_is_taken_before_it_is_needed(store, base):
    with Checkpointer(store) as checkpointer:
        checkpointer.save(base + 1, {"x": torch.ones(5)}, wait=False).wait(timeout=30)
        checkpointer._background._thread.join(20)
        assert None not in checkpointer._background._slots
