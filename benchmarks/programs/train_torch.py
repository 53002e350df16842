"""Hand-written PyTorch: `train_torch.py raw|ddp|fsdp2|fsdp2_kept`, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.

Lanes are micro-batches, gradients accumulate and travel with the last of them, the optimizer is fused. `fsdp2_kept` keeps gathered
parameters from the first micro-batch to the last: quicker than FSDP2's own choice, for the memory of whole parameters.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_task as task
from train_baton import Baton

# What a side does around micro-batch `number` of `total`.
Around = Callable[[int, int], contextlib.AbstractContextManager[Any]]


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    form = sys.argv[1]
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if form != "raw":
        dist.init_process_group("gloo")
    model = task.model()
    wrapped, around = FORMS[form](model)
    optimizer = task.optimizer(wrapped.parameters())
    lanes = range(task.LANES * rank // world_size, task.LANES * (rank + 1) // world_size)
    batches = task.batches(lanes)
    # Both average over the ranks; the global mean over all lanes is wanted.
    scale = world_size / task.TOKENS_PER_STEP
    baton = Baton(rank)
    index = 0
    while baton.before():
        total = 0.0
        own = batches[index % len(batches)]
        for number, batch in enumerate(own):
            with around(number, len(own)):
                loss, _ = task.loss(wrapped, batch)
                (loss * scale).backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        baton.after(total * scale)
        index += 1
    if form != "raw":
        dist.destroy_process_group()


def raw(model: torch.nn.Module) -> tuple[torch.nn.Module, Around]:
    return model, lambda number, total: contextlib.nullcontext()


def ddp(model: torch.nn.Module) -> tuple[torch.nn.Module, Around]:
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    return (
        wrapped,
        lambda number, total: (
            contextlib.nullcontext() if number == total - 1 else wrapped.no_sync()
        ),
    )


def fsdp2(model: Any) -> tuple[torch.nn.Module, Around]:
    from torch.distributed.fsdp import fully_shard

    for block in task.blocks(model):
        fully_shard(block)
    fully_shard(model)
    return model, lambda number, total: _sync_last(model, number == total - 1, keeps=False)


def fsdp2_kept(model: Any) -> tuple[torch.nn.Module, Around]:
    from torch.distributed.fsdp import fully_shard

    for block in task.blocks(model):
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    return model, lambda number, total: _sync_last(model, number == total - 1, keeps=True)


@contextlib.contextmanager
def _sync_last(model: Any, is_last: bool, *, keeps: bool) -> Any:
    model.set_requires_gradient_sync(is_last)
    if keeps:
        model.set_reshard_after_backward(is_last)
    yield


FORMS = {"raw": raw, "ddp": ddp, "fsdp2": fsdp2, "fsdp2_kept": fsdp2_kept}

if __name__ == "__main__":
    main()
