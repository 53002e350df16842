"""The same collectives where the ranks count as being on two hosts: shared memory inside each, Gloo between."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from collective_cases import *  # noqa: F403

from argosy.errors import MismatchError

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
    if rank < 2:  # of one host; nothing leaves it
        try:
            dist.all_reduce(tensor, dist.ReduceOp.AVG if rank else dist.ReduceOp.SUM)
        except MismatchError as mismatch:
            said = str(mismatch)
        assert "all_reduce(avg)" in said, said
        assert "all_reduce(sum)" in said, said
    assert tensor.tolist() == [1, 1, 1]
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size, size, size]


def prepare(rank, size):
    os.environ["ARGOSY_LOCALITY"] = "left" if rank < (size + 1) // 2 else "right"
