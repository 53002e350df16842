"""Several processes agree on what has not changed, on when to save and on what goes; replicas that differ are not mixed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from argosy.checkpoint import Checkpointer, groups
from argosy.checkpoint.retention import Keep

pytestmark = pytest.mark.multiprocess


class Net(torch.nn.Module):
    """A frozen matrix cut by columns, so that ranks share its blocks, and two plain tensors that a rank may have for itself."""

    def __init__(self, rank, size):
        super().__init__()
        mesh = DeviceMesh("cpu", torch.arange(size), _init_backend=False)
        whole = torch.arange(300 * 64.0).reshape(300, 64)
        piece = whole.chunk(size, dim=1)[rank].contiguous()
        cut = DTensor.from_local(
            piece, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        self.base = torch.nn.Parameter(cut, requires_grad=False)
        self.head = torch.nn.Parameter(torch.zeros(40_000))
        self.register_buffer("mine", torch.full((3_000_000,), float(rank)))
        self.register_buffer("own", torch.full((3_000_000,), float(rank)))


def test_ranks_link_what_none_of_them_changed_and_never_mix_replicas(ranks, tmp_path):
    path = tmp_path / "store"

    def body(rank):
        model = Net(rank, 2)
        due = []
        group = groups.of_process(seconds=20)
        with Checkpointer(path, group=group, keep=Keep(last=2)) as checkpointer:
            for step in range(1, 5):
                with torch.no_grad():
                    model.head.add_(1.0)
                    if step == 4 and rank == 1:
                        model.base.to_local()[0, 0] += 1.0
                due.append(checkpointer.is_due(step))
                checkpointer.save(step, {"model": model}, streams=False)
        return due

    results = ranks(2, body)
    assert [one.get("error") for one in results] == [None, None], results
    checkpointer = Checkpointer(path)
    assert checkpointer.steps() == [3, 4]
    for step in (3, 4):
        assert checkpointer.catalogue.verify(step).faults == []
    with checkpointer.open(3) as third, checkpointer.open(4) as fourth:
        origins = {
            name: one.origin and one.origin.step
            for name, one in third.manifest.files.items()
            if name.endswith("safetensors")
        }
        assert sorted(origins.values(), key=str) == [1, None]
        (frozen,) = [name for name, origin in origins.items() if origin == 1]
        assert third.manifest.files[frozen].kind == "frozen"
        assert fourth.manifest.files[frozen].origin is None
        assert fourth.tensor("base")[0, 32] == third.tensor("base")[0, 32] + 1.0
        assert float(fourth.tensor("head")[-1]) == 4.0
        for name in ("mine", "own"):
            assert len(fourth.tensor(name).read().unique()) == 1
    assert [name for name in os.listdir(path) if Path(name).suffix == ".json"] == []


def test_ranks_load_their_parts_from_an_object_store_and_fail_together(tmp_path):
    program = Path(__file__).parents[1] / "programs" / "object_store_ranks.py"
    commands = [[sys.executable, str(program), str(rank), "2", str(tmp_path)] for rank in range(2)]
    started = [
        subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for one in commands
    ]
    try:
        ended = [one.communicate(timeout=240) for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0, 0], ended
    for (out, _), failed in zip(ended, ("TimedOut", "PartnerRefused"), strict=True):
        is_far, is_right, kind, what = json.loads(out)
        assert is_far
        assert is_right
        assert kind == failed
        assert "cannot be listed" in what
