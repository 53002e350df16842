"""A training whose processes are all killed goes on from its last checkpoint, with other numbers of ranks, to the same bits and the same random numbers; a plain script reads what it saved."""

import contextlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from argosy.checkpoint import Checkpointer, Peers, commits, names
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.peers import notes
from argosy.checkpoint.peers.unixroute import UnixRoute
from argosy.checkpoint.sessions import Record

pytestmark = [pytest.mark.multiprocess, pytest.mark.faults]

PROGRAM = Path(__file__).parents[1] / "multiprocess" / "programs" / "saving_training.py"
STEPS = 30


def start(directory, ranks, *words, **environment):
    return subprocess.Popen(
        [sys.executable, PROGRAM, "-n", str(ranks), *map(str, words)],
        cwd=directory,
        env={**os.environ, "STEPS": str(STEPS), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return re.search(r"digest (\w+)", out)[1], errors


def wait_saved(process, directory, step):
    """Until a checkpoint of this step, or a later one, is there."""
    deadline = time.monotonic() + 60
    while max(steps_of(directory), default=0) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def kill_after(process, directory, step, pause):
    """Kill everything of it a moment after a checkpoint of this step, or a later one, is there."""
    wait_saved(process, directory, step)
    time.sleep(pause)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def steps_of(directory):
    return [
        step for run in directory.glob("runs/*") for step in Listing(run / "checkpoints").steps()
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The digest of a training that nobody disturbs, and where it saved."""
    directory = tmp_path_factory.mktemp("whole")
    digest, _ = finish(start(directory, 1))
    (run,) = directory.glob("runs/*")
    return digest, run / "checkpoints"


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_and_resumed_at_four_two_and_three_ranks_it_ends_with_the_same_bits(
    whole, tmp_path, seed
):
    draw = random.Random(seed)
    first = start(tmp_path, 4, PAUSE="0.2")
    kill_after(first, tmp_path, 6, draw.random() * 0.4)
    (run,) = tmp_path.glob("runs/*")
    # The writer process finishes what the first one had begun; the second one is to save something itself.
    assert commits.wait_finished(run / "checkpoints", 60)
    newest = steps_of(tmp_path)[-1]
    second = start(tmp_path, 2, "--resume", run, PAUSE="0.2")
    kill_after(second, tmp_path, max(15, newest + 1), draw.random() * 0.4)
    digest, errors = finish(start(tmp_path, 3, "--resume", run))
    assert re.search(r"goes on from step (1[5-9]|2\d) ", errors), errors
    assert digest == whole[0]
    assert Listing(run / "checkpoints").steps()[-1] == STEPS
    past = Record(run / "checkpoints").read()
    assert (past.failures, past.is_open) == (2, False)


def test_a_rank_that_is_replaced_is_no_failure_that_saves_must_come_closer_for(whole, tmp_path):
    process = start(tmp_path, 2, PAUSE="0.03")
    wait_saved(process, tmp_path, 6)
    saving, _ = sorted(psutil.Process(process.pid).children(), key=lambda one: one.pid)
    saving.kill()
    digest, _ = finish(process)
    assert digest == whole[0]
    (run,) = tmp_path.glob("runs/*")
    past = Record(run / "checkpoints").read()
    assert (past.failures, past.is_open) == (0, False)


def test_a_run_that_goes_on_elsewhere_takes_what_it_knows_of_failures_along(whole, tmp_path):
    first = start(tmp_path, 2, PAUSE="0.03")
    kill_after(first, tmp_path, 6, 0.02)
    (old,) = tmp_path.glob("runs/*")
    new = tmp_path / "elsewhere"
    digest, _ = finish(start(tmp_path, 1, "--resume", old, "--directory", new))
    assert digest == whole[0]
    past = Record(new / "checkpoints").read()
    assert (past.failures, past.is_open) == (1, False)


def measured(path):
    return [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]


def test_steps_that_are_made_again_after_a_total_loss_stand_once_among_the_measurements(tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for directory in (undisturbed, disturbed):
        directory.mkdir()
    finish(start(undisturbed, 1, LOG="1"))
    first = start(disturbed, 3, LOG="1", EVERY="20", HOLD="25")
    wait_saved(first, disturbed, 20)
    (run,) = disturbed.glob("runs/*")
    path, aside = run / "metrics.jsonl", run / "metrics.superseded.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or len(measured(path)) < 26:
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    finish(start(disturbed, 2, "--resume", run, LOG="1"))
    (whole,) = undisturbed.glob("runs/*/metrics.jsonl")
    assert measured(path) == measured(whole)
    assert measured(aside) == measured(whole)[20:26]


def test_a_run_that_was_stopped_and_saved_has_not_failed(whole, tmp_path):
    first = start(tmp_path, 2, PAUSE="0.03")
    wait_saved(first, tmp_path, 6)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    (run,) = tmp_path.glob("runs/*")
    digest, _ = finish(start(tmp_path, 2, "--resume", run))
    assert digest == whole[0]
    past = Record(run / "checkpoints").read()
    assert (past.failures, past.is_open) == (0, False)


def test_without_recovery_what_is_saved_beside_training_is_copied_and_has_the_same_bits(
    whole, tmp_path
):
    first = start(tmp_path, 2, PAUSE="0.03", RECOVERY="off")
    kill_after(first, tmp_path, 6, 0.02)
    (run,) = tmp_path.glob("runs/*")
    digest, _ = finish(start(tmp_path, 2, "--resume", run))
    assert digest == whole[0]


def test_a_run_whose_disk_is_lost_goes_on_from_an_object_store(whole, tmp_path):
    url = (tmp_path / "far").as_uri()
    digest, _ = finish(start(tmp_path, 2, OBJECTS=url, STEPS="20"))
    assert digest != whole[0]
    (run,) = tmp_path.glob("runs/*")
    shutil.rmtree(run / "checkpoints")
    digest, errors = finish(start(tmp_path, 3, "--resume", run, OBJECTS=url))
    assert "goes on from step 20 " in errors
    assert digest == whole[0]


@pytest.mark.parametrize("is_lost", [False, True], ids=["disk", "object store"])
def test_a_run_that_goes_on_in_a_directory_of_its_own_goes_on_with_its_uploads(tmp_path, is_lost):
    url = (tmp_path / "far").as_uri()

    def uploaded():
        return sorted(one.parent.name for one in tmp_path.glob("far/step-*/MANIFEST.json"))

    _, errors = finish(start(tmp_path, 2, OBJECTS=url, STEPS="20"))
    before = uploaded()
    (run,) = tmp_path.glob("runs/*")
    if is_lost:
        shutil.rmtree(run / "checkpoints")
    words = ("--resume", run, "--directory", tmp_path / "own", "--name", "other")
    _, more = finish(start(tmp_path, 2, *words, OBJECTS=url))
    assert before[-1] == "step-000000020"
    assert uploaded()[-1] > before[-1]
    assert "uploaded into by" not in more
    assert "Traceback" not in errors + more


@pytest.fixture
def holders(tmp_path):
    """Two holders in the place of two hosts; a route to both."""
    directory = tmp_path / "sockets"
    command = [sys.executable, "-m", "argosy.checkpoint.peers", str(directory)]
    with contextlib.ExitStack() as stack:
        for host in ("a", "b"):
            stack.enter_context(subprocess.Popen([*command, host, "--stay"]))
        route = UnixRoute(Peers(hosts=("a", "b"), host="a", directory=str(directory)))
        deadline = time.monotonic() + 60
        while not all((directory / names.holder_name(host)).exists() for host in ("a", "b")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        try:
            yield route
        finally:
            for host in ("a", "b"):
                route.end(host)


def test_a_run_whose_disk_is_lost_goes_on_from_the_memory_of_a_peer(whole, tmp_path, holders):
    sockets = str(holders.directory)
    digest, _ = finish(start(tmp_path, 2, PEERS=sockets, STEPS="20"))
    assert digest != whole[0]
    (run,) = tmp_path.glob("runs/*")
    name = notes.noted(run).run
    copied = [label.step for label in holders.list("b", name)]
    assert copied[-1] == 20
    assert not any(step % 5 for step in copied), "they have their own interval"
    shutil.rmtree(run / "checkpoints")
    # The host's own memory is lost, too.
    holders.end("a")
    digest, errors = finish(start(tmp_path, 3, "--resume", run, PEERS=sockets))
    assert re.search(r"goes on from step 20 of .*, from the memory of a, b\n", errors), errors
    assert digest == whole[0]
    assert [label.step for label in holders.list("b", name)][-1] == STEPS


def test_a_plain_script_goes_on_from_a_trainers_checkpoint(whole):
    torch.manual_seed(99)
    program = runpy.run_path(PROGRAM)
    model = program["model"]()
    optimizer = program["optimizer"]([p for p in model.parameters() if p.requires_grad])
    checkpointer = Checkpointer(whole[1])
    loaded = checkpointer.load({"model": model, "optimizer": optimizer}, streams=False)
    assert loaded.step == STEPS
    assert optimizer.state[model[0].weight]["step"].item() == STEPS
    assert optimizer.param_groups[0]["lr"] == 1e-2
    with checkpointer.open() as opened:
        assert torch.equal(opened.tensor("0.weight").read(), model[0].weight)
        assert not torch.equal(opened.tensor("ema/0.weight").read(), model[0].weight)
        kinds = {name: record.kind for name, record in opened.manifest.tensors.items()}
    assert kinds["3.weight"] == "frozen"
    assert kinds["optimizer/0.weight/exp_avg"] == "optimizer"
    out = model.train()(torch.randn(8, 16)).sum()
    out.backward()
    optimizer.step()
