"""The same collectives where the ranks count as being on two hosts: shared memory inside each, Gloo between."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from collective_cases import *  # noqa: F403

from argosy.errors import MismatchError
from argosy.move import counters

# Between hosts the order of additions is another one: inside each host first.
del case_halves_are_added_in_single_precision_with_equal_bits_on_all_ranks  # noqa: F821


def case_bits_are_equal_on_all_ranks(rank, size):
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(100_001, generator=torch.Generator().manual_seed(rank)).to(dtype)
        dist.all_reduce(tensor)
        copies = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(copies, tensor)
        assert all(torch.equal(copy, tensor) for copy in copies)


def case_an_average_beside_a_sum_is_a_mismatch(rank, size):
    tensor, said = torch.ones(3), "nothing"
    try:
        dist.all_reduce(tensor, dist.ReduceOp.AVG if rank == 1 else dist.ReduceOp.SUM)
    except MismatchError as mismatch:
        said = str(mismatch)
    assert "all_reduce(avg)" in said, said
    assert "all_reduce(sum)" in said, said
    assert tensor.tolist() == [1, 1, 1]
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size, size, size]


def case_halves_are_rounded_once_in_every_reduction(rank, size):
    parts = torch.randn(size, size * 501, generator=torch.Generator().manual_seed(3)).bfloat16()
    wanted = ((parts[0].float() + parts[1].float()) + parts[2].float()).bfloat16()
    whole = parts[rank].clone()
    dist.reduce(whole, 1)
    assert torch.equal(whole, wanted if rank == 1 else parts[rank])
    part = torch.empty(501, dtype=torch.bfloat16)
    dist.reduce_scatter_single(part, parts[rank])
    assert torch.equal(part, wanted.chunk(size)[rank])


def case_a_mismatch_leaves_the_group_usable_on_all_hosts(rank, size):
    for odd in range(size):
        said = "nothing"
        try:
            if rank == odd:
                dist.all_gather([torch.zeros(2) for _ in range(size)], torch.zeros(2))
            else:
                dist.barrier()
        except MismatchError as mismatch:
            said = str(mismatch)
        assert "all_gather of 2 x float32" in said, said
        assert f"rank {odd}: " in said, said
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3


def case_bytes_are_counted_where_they_go(rank, size):
    """Two ranks here, one there: only first ranks use Gloo, and a rank alone no shared memory."""
    before = counters.snapshot()
    dist.all_reduce(torch.zeros(1000))
    added = counters.own.since(before)
    is_first, is_alone = rank in (0, 2), rank == 2
    assert (added["shared_memory_bytes"] >= 4000) == (not is_alone), added
    assert added["shared_memory_calls"] == int(not is_alone), added
    assert (4000 <= added["gloo_bytes"] < 5000) == is_first, added
    assert added["gloo_calls"] == int(is_first), added


def case_waits_for_another_host_are_stalls(rank, size):
    store = dist.group.WORLD.get_group_store()
    before = counters.snapshot()
    if rank == 2:
        store.wait(["the others wait"])
    else:
        started = dist.all_reduce(torch.zeros(10), async_op=True)
        if rank == 0:
            store.set("the others wait", "1")
        started.wait()
    if rank == 2:
        dist.all_reduce(torch.zeros(10))
    assert rank != 0 or counters.own.since(before)["stalls"] > 0


def prepare(rank, size):
    os.environ["ARGOSY_LOCALITY"] = "left" if rank < (size + 1) // 2 else "right"
