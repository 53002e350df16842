"""Several processes save one checkpoint and load it in other layouts; deaths and refusals end in errors, never in a half one."""

import errno
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from argosy.checkpoint import Checkpointer, PerRank, Writing, groups
from argosy.checkpoint.boards import FileBoard
from argosy.checkpoint.directio import disk_error
from argosy.checkpoint.writer.client import wait_gone
from argosy.errors import ArgosyError
from argosy.move.placements import Pieces

pytestmark = pytest.mark.multiprocess

WHOLE = {
    "rows": (515, 64),
    "columns": (64, 512),
    "both": (96, 80),
    "large": (2304, 1024),
    "few": (2, 3),
    "plain": (300, 7),
    "inner": (5, 8, 6),
}
CUTS = {
    4: {
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "large": [Shard(0), Shard(0)],
        "few": [Shard(0), Shard(1)],
        "inner": [Shard(1), Shard(2)],
    },
    2: {
        "rows": [Shard(1)],
        "columns": [Shard(0)],
        "both": [Shard(1)],
        "large": [Shard(1)],
        "few": [Replicate()],
        "inner": [Shard(0)],
    },
    3: {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "both": [Shard(0)],
        "large": [Shard(0)],
        "few": [Shard(0)],
        "inner": [Shard(2)],
    },
}


def full(name):
    count = torch.Size(WHOLE[name]).numel()
    return torch.arange(count, dtype=torch.float32).add(len(name)).reshape(WHOLE[name])


def cut(tensor, mesh, placements):
    local = tensor
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces, _ = placement._split_tensor(local, mesh.size(axis), with_padding=False)
            local = pieces[mesh.get_coordinate()[axis]]
    local = local.contiguous().clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def layout(size, fill=True):
    """Each tensor as the ranks of this world hold it."""
    mesh = DeviceMesh(
        "cpu", torch.arange(size).reshape((2, 2) if size == 4 else (size,)), _init_backend=False
    )
    found = {}
    for name in WHOLE:
        tensor = full(name) if fill else torch.zeros(WHOLE[name])
        found[name] = cut(tensor, mesh, CUTS[size][name]) if name in CUTS[size] else tensor
    return found


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.fixture
def ranks(forked):
    import torch._dynamo  # DTensor imports it at first use: once here instead of once per fork

    def run(size, body, name="job"):
        def join(rank, directory):
            torch.set_num_threads(1)
            store = dist.FileStore(str(directory / "store"), size)
            dist.init_process_group("fake", store=store, rank=rank, world_size=size)
            # Pieces of torch and of ours that stay open once they were used.
            Checkpointer(directory / f"warm{rank}", group=groups.Group()).save(
                0, {"x": torch.zeros(1)}
            )

        return forked(size, lambda rank, _: body(rank), join, name)

    return run


def saved(path, size=4, step=1, shards=False):
    def body(rank):
        state = {
            "tensors": layout(size),
            "mine": PerRank({"rank": rank, "t": torch.full((2,), float(rank))}),
            "note": [1, 2],
        }
        own = full("rows")[128 * rank : 128 * (rank + 1) if rank < 3 else None]
        state["tensors"]["pieces"] = Pieces(WHOLE["rows"], [((128 * rank, 0), own)])
        group = groups.of_process(seconds=20)
        with Checkpointer(path, group=group, writing=Writing(shards=shards)) as checkpointer:
            checkpointer.save(step, state)
        return torch.rand(1).item()

    return body


def checked(path, size):
    def body(rank):
        wanted = {name: local(tensor) for name, tensor in layout(size).items()}
        state = {"tensors": layout(size, fill=False), "mine": PerRank({}), "note": []}
        kept = dict(state["tensors"])
        Checkpointer(path, group=groups.of_process(seconds=20)).load(state)
        found = state["tensors"]
        wrong = [name for name in wanted if not torch.equal(local(found[name]), wanted[name])]
        moved = [name for name in kept if found[name] is not kept[name]]
        return wrong, moved, state["mine"].value.get("rank"), state["note"]

    return body


def test_a_world_of_four_saves_and_worlds_of_one_two_and_three_load(ranks, tmp_path):
    path = tmp_path / "store"
    results = ranks(4, saved(path))
    assert [one.get("error") for one in results] == [None] * 4, results
    assert [one["leaked"] for one in results] == [0] * 4
    checkpointer = Checkpointer(path)
    assert checkpointer.catalogue.verify(1).faults == []
    names = sorted(os.listdir(path / "step-000000001"))
    assert names == ["MANIFEST.json", "extra-00001-of-00001.safetensors", "extra.json"]
    with checkpointer.open(1) as opened:
        assert opened.manifest.world == {"size": 4}
        for name in WHOLE:
            assert torch.equal(opened.tensor(f"tensors/{name}").read(), full(name)), name
        assert torch.equal(opened.tensor("tensors/pieces").read(), full("rows"))
        assert [opened.value("mine")[f"rank-{r:05d}"]["t"].tolist() for r in range(4)] == [
            [float(r)] * 2 for r in range(4)
        ]
    for size in (2, 3):
        for rank, one in enumerate(ranks(size, checked(path, size), f"load{size}")):
            assert one.get("result") == [[], [], rank, [1, 2]], one


@pytest.mark.parametrize("is_beside", [False, True], ids=["waiting", "beside training"])
def test_a_rank_that_refuses_or_dies_ends_the_save_for_all_and_leaves_nothing(
    ranks, tmp_path, is_beside
):
    path = tmp_path / "store"

    def body(rank):
        said = []
        checkpointer = Checkpointer(path, group=groups.of_process(seconds=3))
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def attempt(step, value):
            state = {"x": value, "y": torch.zeros(4), "model": model, "optimizer": optimizer}
            try:
                if is_beside:
                    handle = checkpointer.save(step, state, wait=False)
                    optimizer.step()  # waits for the plan
                    handle.wait()
                else:
                    checkpointer.save(step, state)
                said.append("saved")
            except ArgosyError as error:
                said.append(f"{type(error).__name__}: {error.what}")

        attempt(1, object() if rank == 1 else 1)  # cannot be saved
        attempt(2, rank)  # differs from rank to rank
        attempt(3, 1)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        attempt(4, 1)
        checkpointer.close()
        return said

    results = ranks(3, body)
    assert results[2] == {"status": 9}
    first, second, third, fourth = results[0]["result"]
    assert re.match(r"Partner\w+: rank 1 has failed: x is a object", first)
    assert results[1]["result"][0].startswith("ConfigError: x is a object")
    assert "differs between rank 0 and rank 1" in second
    assert third == "saved"
    assert "rank 2 has ended" in fourth
    assert wait_gone(path, 10)
    assert sorted(os.listdir(path)) == [".sessions", ".writer", "step-000000003"]


@pytest.mark.parametrize("is_beside", [False, True], ids=["waiting", "beside training"])
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_save_that_one_rank_refuses_before_it_begins_fails_for_all_and_the_next_one_does_not(
    ranks, tmp_path, is_beside, refusing
):
    path = tmp_path / "store"

    def body(rank):
        said = []
        checkpointer = Checkpointer(path, group=groups.of_process(seconds=30))
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        for step in range(1, 6):
            is_refused = step in (1, 3) and rank == refusing
            metrics = {"loss": "low" if is_refused else 1.0}
            try:
                if is_beside:
                    handle = checkpointer.save(step, state, metrics=metrics, wait=False)
                    optimizer.step()
                    handle.wait()
                else:
                    checkpointer.save(step, state, metrics=metrics)
                said.append("saved")
            except ArgosyError as error:
                said.append(f"{type(error).__name__}: {error.what}")
        checkpointer.close()
        return said

    results = [one["result"] for one in ranks(2, body)]
    own, other = results[refusing], results[1 - refusing]
    assert own[1] == own[3] == own[4] == other[1] == other[3] == other[4] == "saved"
    for place in (0, 2):
        assert own[place].startswith("ConfigError: the metric `loss`")
        assert re.match(rf"Partner\w+: rank {refusing} has failed: the metric", other[place])
    assert wait_gone(path, 10)
    assert not [name for name in os.listdir(path) if name.startswith(".staging")]


def test_a_full_disk_is_an_error_of_all_ranks(ranks, tmp_path):
    path = tmp_path / "store"

    def body(rank):
        checkpointer = Checkpointer(path, group=groups.of_process(seconds=30))
        checkpointer.save(1, {"x": torch.ones(3)})
        if rank == 0:
            post = FileBoard.post

            def full(board, key, data):
                if key.startswith(("said", "failed")):
                    raise disk_error(OSError(errno.ENOSPC, "No space left on device"), "full")
                post(board, key, data)

            FileBoard.post = full
        try:
            checkpointer.save(2, {"x": torch.ones(3)})
        except ArgosyError as error:
            return f"{type(error).__name__}: {error.what}"

    results = [one["result"] for one in ranks(2, body)]
    assert results[0].startswith("HomeError: full: No space left")
    assert re.match(r"Partner\w+: ", results[1])
    assert not [name for name in os.listdir(path) if name.startswith(".staging")]


@pytest.mark.parametrize("at", [3, 8], ids=["in the first steps", "later"])
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refused_save_leaves_the_interval_that_ranks_measure_the_same_on_all(
    ranks, tmp_path, refusing, at
):
    path = tmp_path / "store"

    def body(rank):
        said = []
        checkpointer = Checkpointer(path, group=groups.of_process(seconds=30))
        checkpointer._schedule.interval.saw_save(1e-9)  # every step, once enough were seen
        for step in range(1, 12):
            due = checkpointer.is_due(step)
            if step != at and step < 8:
                said.append(due)
                continue
            metrics = {"loss": "low" if step == at and rank == refusing else 1.0}
            try:
                checkpointer.save(step, {"x": torch.ones(3)}, metrics=metrics)
                said.append("saved")
            except ArgosyError as error:
                said.append(type(error).__name__)
        checkpointer.close()
        return said

    results = [one["result"] for one in ranks(2, body)]
    own, other = results[refusing], results[1 - refusing]
    assert own.pop(at - 1) == "ConfigError"
    assert other.pop(at - 1) == "PartnerRefused"
    assert own == other
    assert own[7:] == ["saved"] * 3


def test_a_load_that_fails_on_one_rank_alone_fails_on_all_and_the_next_one_does_not(
    ranks, tmp_path
):
    path = tmp_path / "store"
    with Checkpointer(path, group=groups.Group()) as checkpointer:
        checkpointer.save(1, {"x": torch.arange(3.0)})

    def body(rank):
        said, bad = [], {"x": torch.zeros(4)}
        checkpointer = Checkpointer(path, group=groups.of_process(seconds=30))
        for odd, step in (([], None), (bad, None), (bad, 1), (None, None)):
            state = {"x": torch.zeros(3)}
            try:
                checkpointer.load(odd if rank == 1 and odd is not None else state, step)
                said.append(state["x"].tolist())
            except ArgosyError as error:
                said.append(f"{type(error).__name__}: {error.what}")
        checkpointer.close()
        return said

    first, second = (one["result"] for one in ranks(2, body))
    assert second[0].startswith("ConfigError: ")
    assert all(one.startswith("MismatchError: x") for one in second[1:3]), second
    assert all(re.match("PartnerRefused: rank 1 has failed: ", one) for one in first[:3]), first
    assert first[3] == second[3] == [0.0, 1.0, 2.0]


def test_all_ranks_fall_back_together_when_one_of_them_meets_damage(ranks, tmp_path):
    path = tmp_path / "store"
    with Checkpointer(path, group=groups.Group()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(
                step, {"model": torch.nn.ParameterList([torch.full((4, 40000), float(step))])}
            )
    file = path / "step-000000002" / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)

    def body(rank):
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
        model = torch.nn.ParameterList(
            [torch.nn.Parameter(cut(torch.zeros(4, 40000), mesh, [Shard(0)]))]
        )
        group = groups.of_process(seconds=20)
        loaded = Checkpointer(path, group=group).load({"model": model}, streams=False)
        return loaded.step, model[0].to_local().unique().tolist(), loaded.skipped

    for one in ranks(2, body):
        step, found, skipped = one["result"]
        assert (step, found) == (1, [1.0])
        assert "rank 1" in skipped[0]
        assert "checksum" in skipped[0]


def test_files_of_shards_are_read_by_torch_and_by_other_worlds(ranks, tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    path = tmp_path / "store"
    results = ranks(4, saved(path, shards=True))
    assert [one.get("error") for one in results] == [None] * 4, results
    step = path / "step-000000001"
    names = sorted(one.name for one in step.glob("*.safetensors"))
    assert names == [f"shard-{r:05d}-extra-00001-of-00001.safetensors" for r in range(4)]
    assert Checkpointer(path).catalogue.verify(1).faults == []
    with Checkpointer(path).open(1) as opened:
        assert len(opened.manifest.tensors["tensors/both"].parts) == 4
        assert len(opened.manifest.tensors["tensors/plain"].parts) == 1
        for name in WHOLE:
            assert torch.equal(opened.tensor(f"tensors/{name}").read(), full(name)), name
    found = {f"tensors/{name}": torch.zeros(shape) for name, shape in WHOLE.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(step)), no_dist=True)
    for name in WHOLE:
        assert torch.equal(found[f"tensors/{name}"], full(name)), name
    for rank, one in enumerate(ranks(3, checked(path, 3), "load3")):
        assert one.get("result") == [[], [], rank, [1, 2]], one


class Sharded(torch.nn.Module):
    def __init__(self, mesh, placements, fill):
        super().__init__()
        start = full("both") if fill else torch.zeros(WHOLE["both"])
        laid = start if mesh is None else cut(start, mesh, placements)
        self.weight = torch.nn.Parameter(laid)
        self.bias = torch.nn.Parameter(torch.ones(5) * fill)


def stepped(mesh, placements):
    """A model and AdamW after one step with known gradients."""
    model = Sharded(mesh, placements, fill=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    gradient = full("both").sin()
    model.weight.grad = gradient if mesh is None else cut(gradient, mesh, placements)
    model.bias.grad = torch.arange(5.0)
    optimizer.step()
    return model, optimizer


def test_a_sharded_optimizer_comes_back_in_another_layout_with_its_bits(ranks, tmp_path):
    path = tmp_path / "store"
    model, optimizer = stepped(None, ())
    wanted = {"weight": model.weight, **optimizer.state[model.weight]}

    def save(rank):
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
        mine, own = stepped(mesh, [Shard(0)])
        with Checkpointer(path, group=groups.of_process(seconds=20)) as checkpointer:
            checkpointer.save(1, {"model": mine, "optimizer": own})

    def load(rank):
        mesh = DeviceMesh("cpu", torch.arange(3), _init_backend=False)
        mine = Sharded(mesh, [Shard(1)], fill=False)
        own = torch.optim.AdamW(mine.parameters(), lr=7.0)
        Checkpointer(path, group=groups.of_process(seconds=20)).load(
            {"model": mine, "optimizer": own}
        )
        found = {"weight": mine.weight, **own.state[mine.weight]}
        wrong = []
        for name, tensor in found.items():
            expected = wanted[name].detach()
            if expected.dim():
                expected = local(cut(expected, mesh, [Shard(1)]))
            if not torch.equal(local(tensor.detach()), expected):
                wrong.append(name)
        return wrong, sorted(found), own.param_groups[0]["lr"]

    assert [one.get("error") for one in ranks(2, save, "save")] == [None, None]
    for one in ranks(3, load, "load"):
        assert one["result"] == [[], ["exp_avg", "exp_avg_sq", "step", "weight"], 0.1], one
    plain = Sharded(None, (), fill=False)
    own = torch.optim.AdamW(plain.parameters())
    Checkpointer(path, group=groups.Group()).load({"model": plain, "optimizer": own}, streams=False)
    assert torch.equal(plain.weight, model.weight)
    assert torch.equal(
        own.state[plain.bias]["exp_avg_sq"], optimizer.state[model.bias]["exp_avg_sq"]
    )
