"""SIGKILL at any moment of saving with links, retention and collection: no committed step is lost, pins stay, orphans go."""

import os
import random
import signal
import time

import pytest
import torch

from argosy.checkpoint import Checkpointer, Writing, cleaning
from argosy.checkpoint.commits import Store
from argosy.checkpoint.directio import Files
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.retention import Keep

pytestmark = pytest.mark.faults

TRIALS = 36
KEEP = Keep(last=2, every=10)


class NoLinks(Files):
    def link(self, name, source, directory):
        raise PermissionError(1, "no links here")


class Net(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.base = torch.nn.Parameter(torch.full((50_000,), 7.0), requires_grad=False)
        self.head = torch.nn.Parameter(torch.full((20_000,), float(step)))


def save_for_ever(path, first, pipe, files):
    """Save step after step, tell each when it is durable; the cleaner removes beside it."""
    torch.set_num_threads(1)
    checkpointer = Checkpointer(path, keep=KEEP, writing=Writing(files=files))
    checkpointer.load({"model": Net(0), "step": 0}, streams=False)
    for step in range(first, first + 10_000):
        checkpointer.save(step, {"model": Net(step), "step": step}, streams=False)
        os.write(pipe, step.to_bytes(8, "little"))
        if step > 2 and not checkpointer.catalogue.pins():
            checkpointer.catalogue.pin(step, "for ever")


def check(path, told):
    checkpointer = Checkpointer(path)
    steps = checkpointer.steps()
    assert not told or steps[-1] >= told
    for step in steps[-2:] + steps[:1]:
        assert checkpointer.catalogue.verify(step).faults == []
    assert set(checkpointer.catalogue.pins()) <= set(steps)
    assert set(range(10, told - 1, 10)) <= set(steps)
    if steps:
        model = Net(0)
        assert checkpointer.load({"model": model, "step": 0}, streams=False).step == steps[-1]
        assert float(model.head.detach()[-1]) == steps[-1]
        assert float(model.base[-1]) == 7.0


@pytest.mark.parametrize("kind", [Files, NoLinks])
def test_no_committed_step_is_lost_whenever_the_process_is_killed(tmp_path, kind):
    draw = random.Random(5)
    told = 0
    for trial in range(TRIALS // 2):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                signal.alarm(60)
                save_for_ever(tmp_path, told + 1, writing, kind())
            finally:
                os._exit(70)
        os.close(writing)
        if trial % 4:
            os.read(reading, 8)
            told += 1
        time.sleep(draw.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while data := os.read(reading, 8):
            told = int.from_bytes(data, "little")
        os.close(reading)
        check(tmp_path, told)
        told = max([told, *Checkpointer(tmp_path).steps()])
    listing, store = Listing(tmp_path), Store(tmp_path)
    store.lock()
    cleaning.collect(store, listing)
    cleaning.clean(store, listing, KEEP)
    store.close()
    check(tmp_path, told)
    assert len(listing.pins()) == 1
    hidden = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert [name for name in hidden if not name.startswith(".writer")] == [".sessions"]
