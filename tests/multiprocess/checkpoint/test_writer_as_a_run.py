"""In a cluster the writer process is a run of its own: it outlives the rank that the cluster ends, and the run."""

import json

import pytest
import torch

from argosy.checkpoint import Checkpointer
from argosy.checkpoint.writer.client import wait_gone

pytestmark = pytest.mark.multiprocess

SAVES = """
import os, signal, sys, time
import torch
import argosy as ar

writing = ar.checkpoint.Writing(bytes_per_second=24e6)
checkpointer = ar.checkpoint.Checkpointer(sys.argv[1], writing=writing)
checkpointer.save(1, {"x": torch.full((6_000_000,), 1.0)})
handle = checkpointer.save(2, {"x": torch.full((6_000_000,), 2.0)}, wait=False)
handle.wait("staged")
print("done" if handle.is_done else "staged", flush=True)
if sys.argv[2:]:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""

RANKS = """
import os, sys
import torch
import argosy as ar

os.umask(0o027)
torch.distributed.init_process_group("gloo")
with ar.checkpoint.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, {"x": torch.arange(70_000.0)}, wait=False).wait()
    torch.distributed.barrier()
"""


def helpers_of(argosy, run):
    return [view for view in argosy.json("ps", "--all")["runs"] if view["helps"] == run]


def test_a_staged_save_outlives_the_run_of_its_rank(argosy):
    store = argosy.work / "killed"
    run = argosy.detach(argosy.script("saves.py", SAVES), "--", store, "die")
    argosy.wait_ended(run)
    assert argosy("logs", run).stdout.endswith("staged\n")
    x = torch.zeros(6_000_000)
    with Checkpointer(store) as checkpointer:
        assert checkpointer.load({"x": x}).step == 2
    assert torch.equal(x, torch.full((6_000_000,), 2.0))
    (helper,) = helpers_of(argosy, run)
    assert argosy.wait_ended(helper["run"])["outcome"] == "succeeded"
    assert wait_gone(store, 10)


def test_a_writer_that_is_stopped_finishes_what_it_was_given(argosy):
    store = argosy.work / "stopped"
    run = argosy.detach(argosy.script("saves.py", SAVES), "--", store)
    argosy.wait_until(lambda: "staged" in argosy("logs", run).stdout, "the staged save")
    (helper,) = helpers_of(argosy, run)
    assert (helper["name"], helper["state"]) == ("writer", "running")
    assert f"works for {run}" in argosy("ps").stdout
    assert argosy.json("why")["run"] == run, "a run that helps is not meant by no name"
    assert "stopped" in argosy("stop", "--all").stdout
    with Checkpointer(store) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.catalogue.verify(2).faults == []


def test_ranks_that_save_at_once_have_one_writer_with_the_umask_of_the_program(argosy):
    store = argosy.work / "ranks"
    done = argosy("run", "--json", "-n", "3", argosy.script("ranks.py", RANKS), "--", store)
    run = json.loads(done.stdout.splitlines()[-1])["run"]
    assert len(helpers_of(argosy, run)) == 1
    files = list((store / "step-000000001").iterdir())
    assert files
    assert all(file.stat().st_mode & 0o777 == 0o640 for file in files)
