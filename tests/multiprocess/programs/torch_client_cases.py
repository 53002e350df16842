"""Torch's own users of process groups, run on the argosy backend and on Gloo in the same ranks; results must agree."""

from __future__ import annotations

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from argosy.checkpoint import Checkpointer
from argosy.move import counters
from argosy.move.fsdp import fsdp_fast_path
from argosy.move.groups import ArgosyGroup

_gloo = {}


def gloo():
    if "group" not in _gloo:
        _gloo["group"] = dist.new_group(backend="gloo")
    return _gloo["group"]


def network(dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(24, 37), torch.nn.GELU(), torch.nn.Linear(37, 8)).to(
        dtype
    )


def train(model, rank, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        loss = model(torch.randn(5, 24, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def assert_agree(ours, theirs, size):
    for a, b in zip(ours, theirs, strict=True):
        if size == 2:
            assert torch.equal(a, b)  # two numbers have one sum
        else:
            torch.testing.assert_close(a, b)


def case_ddp(rank, size):
    ours = train(DistributedDataParallel(network()), rank)
    assert_agree(ours, train(DistributedDataParallel(network(), process_group=gloo()), rank), size)


def sharded(group, mesh=None, *, policy=None, is_fast=False):
    model = network()
    options = {"mesh": mesh or DeviceMesh.from_group(group, "cpu")}
    if policy is not None:
        options["mp_policy"] = policy
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    if is_fast:
        assert fsdp_fast_path(model) == 2
    return model


def case_fsdp2_in_single_precision_plain_and_fast(rank, size):
    theirs = train(sharded(gloo()), rank, steps=6)
    before = counters.snapshot()
    assert_agree(train(sharded(dist.group.WORLD), rank, steps=6), theirs, size)
    plain = counters.own.since(before)["shared_memory_bytes"]
    before = counters.snapshot()
    model = sharded(dist.group.WORLD, is_fast=True)
    assert_agree(train(model, rank, steps=6), theirs, size)
    # The same tensors take part, beside the few words of each meeting.
    assert plain <= counters.own.since(before)["shared_memory_bytes"] < plain * 1.2
    state = model._get_fsdp_state()._fsdp_param_group
    for comm in (state._all_gather_comm, state._reduce_scatter_comm):
        assert (
            comm.slots.num_shared > comm.slots.num_ordinary
        )  # the shared slots were used, not only their substitute


def case_fsdp2_in_bfloat16_plain_and_fast(rank, size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert_agree(
        train(sharded(dist.group.WORLD, policy=wide), rank),
        train(sharded(gloo(), policy=wide), rank),
        size,
    )
    plain = train(sharded(dist.group.WORLD, policy=policy), rank)
    fast = train(sharded(dist.group.WORLD, policy=policy, is_fast=True), rank)
    assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))


def case_hsdp(rank, size):
    if size < 4:
        return
    results = []
    for backend, is_fast in (("gloo", False), ("argosy", False), ("argosy", True)):
        rows = [dist.new_group(ranks, backend=backend) for ranks in ([0, 1], [2, 3])]
        columns = [dist.new_group(ranks, backend=backend) for ranks in ([0, 2], [1, 3])]
        mesh = DeviceMesh.from_group(
            [columns[rank % 2], rows[rank // 2]],
            "cpu",
            mesh=torch.arange(4).view(2, 2),
            mesh_dim_names=("replicate", "shard"),
        )
        results.append(train(sharded(None, mesh, is_fast=is_fast), rank))
    assert_agree(results[1], results[0], size)
    assert_agree(results[2], results[0], size)


def case_dtensor(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    assert isinstance(mesh.get_group(), ArgosyGroup)
    whole = torch.arange(size * 12 * 6.0).view(size * 12, 6)
    shard = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(shard.full_tensor(), whole)
    assert torch.equal(shard.redistribute(placements=[Shard(1)]).full_tensor(), whole)
    assert torch.equal(shard.redistribute(placements=[Replicate()]).to_local(), whole)
    partial = DTensor.from_local(torch.ones(4 * size, 3), mesh, [Partial()])
    assert torch.equal(
        partial.redistribute(placements=[Replicate()]).to_local(),
        torch.full((4 * size, 3), float(size)),
    )
    assert torch.equal(
        partial.redistribute(placements=[Shard(0)]).to_local(), torch.full((4, 3), float(size))
    )
    torch.testing.assert_close((shard @ shard.t()).full_tensor(), whole @ whole.t())


def case_tensor_parallel(rank, size):
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 8 * size), torch.nn.ReLU(), torch.nn.Linear(8 * size, 16)
    )
    given = torch.randn(3, 16)
    wanted = model(given)
    wanted.sum().backward()
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    mesh = dist.init_device_mesh("cpu", (size,))
    parallel = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = parallel(given)
    torch.testing.assert_close(out, wanted)
    out.sum().backward()
    torch.testing.assert_close(parallel[0].weight.grad.full_tensor(), gradient)


def case_checkpoints(rank, size):
    name = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name, 0)
    model = sharded(dist.group.WORLD)
    train(model, rank, steps=1)
    wanted = {key: value.full_tensor() for key, value in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=name[0])
    other = sharded(dist.group.WORLD)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=name[0])
    other.load_state_dict(state)
    for key, value in other.state_dict().items():
        assert torch.equal(value.full_tensor(), wanted[key])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(name[0])


def case_checkpoints_of_our_own(rank, size):
    name = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name, 0)
    model = sharded(dist.group.WORLD)
    wanted = train(model, rank, steps=1)
    with Checkpointer(name[0]) as checkpointer:
        checkpointer.save(1, {"model": model})
        other = sharded(dist.group.WORLD)
        assert checkpointer.load({"model": other}).step == 1
    for found, value in zip(other.parameters(), wanted, strict=True):
        assert torch.equal(found.full_tensor(), value)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(name[0])


def case_pipelining(rank, size):
    torch.manual_seed(9)
    layers = [torch.nn.Linear(6, 6) for _ in range(size)]
    given, target = torch.randn(8, 6), torch.randn(8, 6)
    x = given
    for layer in layers:
        x = layer(x)
    torch.nn.functional.mse_loss(x, target).backward()
    wanted = layers[rank].weight.grad.clone()
    layers[rank].zero_grad()
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"), group=dist.group.WORLD)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    if rank == 0:
        schedule.step(given)
    elif rank == size - 1:
        losses = []
        out = schedule.step(target=target, losses=losses)
        torch.testing.assert_close(out, x)
    else:
        schedule.step()
    torch.testing.assert_close(layers[rank].weight.grad, wanted)
