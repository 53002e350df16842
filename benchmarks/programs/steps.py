"""A plain torchrun-style training script: steps with an all-reduce, its own checkpoint, no knowledge of its launcher.

Each rank appends `step time_ns pid restarts total` to its own file after every step. Rank 0 saves the step every step, and a restarted
gang goes on from there.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEPS = int(os.environ.get("BENCH_STEPS", "100000"))

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
out = Path(os.environ["BENCH_DIR"])
checkpoint = out / "checkpoint.pt"
weights = torch.zeros(4096)
first = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    first, weights = saved["step"] + 1, saved["weights"]

with (out / f"rank{rank}.steps").open("a", buffering=1) as record:
    for step in range(first, STEPS):
        gradient = torch.full_like(weights, float(rank + 1))
        dist.all_reduce(gradient)
        weights += gradient
        if rank == 0:
            torch.save({"step": step, "weights": weights}, out / ".checkpoint.pt")
            os.replace(out / ".checkpoint.pt", checkpoint)
        # The next step must not begin before the checkpoint of this one exists: the steps are then exactly replayable.
        dist.barrier()
        record.write(
            f"{step} {time.time_ns()} {os.getpid()} "
            f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {float(weights[0])}\n"
        )
        time.sleep(0.02)
dist.destroy_process_group()
