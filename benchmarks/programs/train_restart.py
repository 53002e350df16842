"""DDP as one writes it for torchrun: a checkpoint after every step by rank 0, loaded when the gang is started again.

Each rank appends `step time_ns pid loss` to its own file after every committed step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_task as task


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out = Path(os.environ["BENCH_DIR"])
    checkpoint = out / "checkpoint.pt"
    model = torch.nn.parallel.DistributedDataParallel(
        task.model(), gradient_as_bucket_view=True, broadcast_buffers=False
    )
    optimizer = task.optimizer(model.parameters())
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True, mmap=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    lanes = range(task.LANES * rank // world_size, task.LANES * (rank + 1) // world_size)
    batches = task.batches(lanes)
    scale = world_size / task.TOKENS_PER_STEP
    with (out / f"rank{rank}.steps").open("a", buffering=1) as record:
        for step in range(first, int(os.environ.get("BENCH_STEPS", "1000000"))):
            total = 0.0
            own = batches[step % len(batches)]
            for batch in own[:-1]:
                with model.no_sync():
                    total += _backward(model, batch, scale)
            total += _backward(model, own[-1], scale)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, out / ".checkpoint.pt")
                os.replace(out / ".checkpoint.pt", checkpoint)
            # The next step must not begin before the checkpoint of this one exists.
            dist.barrier()
            record.write(f"{step} {time.time_ns()} {os.getpid()} {total * scale!r}\n")
    dist.destroy_process_group()


def _backward(model: torch.nn.Module, batch: task.Micro, scale: float) -> float:
    loss, _ = task.loss(model, batch)
    (loss * scale).backward()
    return float(loss.detach())


if __name__ == "__main__":
    main()
