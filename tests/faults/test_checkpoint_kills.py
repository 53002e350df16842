"""SIGKILL at any moment of saving, committing and removing: what was reported durable is there and whole."""

import os
import random
import signal
import time

import pytest
import torch

from argosy.checkpoint import Checkpointer
from argosy.checkpoint.commits import Store

pytestmark = pytest.mark.faults

TRIALS = 40


def value(step):
    return torch.full((70_000,), float(step))


def save_for_ever(path, first, pipe):
    """Save step after step, keep three, tell each step only when it is durable."""
    torch.set_num_threads(1)
    checkpointer = Checkpointer(path)
    for step in range(first, first + 10_000):
        checkpointer.save(step, {"x": value(step), "step": step})
        os.write(pipe, step.to_bytes(8, "little"))
        for old in checkpointer.steps()[:-3]:
            checkpointer._store.remove(old)


def test_no_durable_step_is_lost_whenever_the_process_is_killed(tmp_path):
    draw = random.Random(11)
    told = 0
    for trial in range(TRIALS):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                signal.alarm(60)
                save_for_ever(tmp_path, told + 1, writing)
            finally:
                os._exit(70)
        os.close(writing)
        # The first save of a process opens, locks and sweeps: some kills must hit that too.
        if trial % 4:
            os.read(reading, 8)
            told += 1
        time.sleep(draw.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while data := os.read(reading, 8):
            told = int.from_bytes(data, "little")
        os.close(reading)
        check(tmp_path, told)
        told = max([told, *Checkpointer(tmp_path).steps()])
    store = Store(tmp_path)
    store.lock()
    store.sweep()
    store.close()
    hidden = sorted(name for name in os.listdir(tmp_path) if name.startswith("."))
    assert hidden == [".sessions", ".writer"]


def check(path, told):
    """The newest that was told is there, or newer; every step that has a name is whole."""
    checkpointer = Checkpointer(path)
    steps = checkpointer.steps()
    if told:
        assert steps
        assert steps[-1] >= told
    for step in steps[-3:]:
        assert checkpointer.catalogue.verify(step).faults == []
    if steps:
        x = torch.zeros(70_000)
        loaded = checkpointer.load({"x": x, "step": 0})
        assert loaded.step == loaded.values["step"] == steps[-1]
        assert torch.equal(x, value(steps[-1]))
