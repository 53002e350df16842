"""One replica of torchft on the same task: `train_torchft.py NUMBER COUNT`, a replica group of one process, TORCHFT_LIGHTHOUSE in the environment.

Appends `step time_ns pid loss` to its own file after every step that was committed. A replica that starts again heals from a living one.
Gradients travel by the manager's own all-reduce, in one flat buffer: the DDP wrapper of torchft 0.2 ends the survivors of a kill on Gloo with an AssertionError.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_task as task


def main() -> None:
    torch.set_num_threads(1)
    number, count = int(sys.argv[1]), int(sys.argv[2])
    out = Path(os.environ["BENCH_DIR"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inner = task.model()
    plain = task.optimizer(inner.parameters())

    def load_state(state: dict[str, Any]) -> None:
        inner.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": inner.state_dict(), "optimizer": plain.state_dict()}

    manager = Manager(
        # Survivors of a kill wait for this long in their all-reduce; 5 is the value of torchft's own example.
        pg=ProcessGroupGloo(timeout=timedelta(seconds=float(os.environ["BENCH_WAIT_SECONDS"]))),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=state,
        replica_id=f"train_{number}",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        init_sync=False,  # all begin with the same weights
    )
    optimizer = Optimizer(manager, plain)
    lanes = range(task.LANES * number // count, task.LANES * (number + 1) // count)
    batches = task.batches(lanes)
    # The manager averages over the replicas that take part.
    scale = count / task.TOKENS_PER_STEP
    with (out / f"rank{number}.steps").open("a", buffering=1) as record:
        while manager.current_step() < int(os.environ.get("BENCH_STEPS", "1000000")):
            step = manager.current_step()
            optimizer.zero_grad()
            total = 0.0
            own = batches[step % len(batches)]
            for batch in own:
                total += _backward(inner, batch, scale)
            _average(manager, inner)
            optimizer.step()
            if manager.current_step() > step:
                record.write(f"{step} {time.time_ns()} {os.getpid()} {total * scale!r}\n")
    manager.shutdown(wait=False)


def _average(manager: Manager, model: torch.nn.Module) -> None:
    """The gradients' mean over the replicas; a failure makes the manager refuse the commit."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch._utils._flatten_dense_tensors(gradients)
    try:
        manager.allreduce(flat).wait()
    except RuntimeError as failure:
        manager.report_error(failure)
        return
    whole = torch._utils._unflatten_dense_tensors(flat, gradients)
    for gradient, mean in zip(gradients, whole, strict=True):
        gradient.copy_(mean)


def _backward(model: torch.nn.Module, batch: task.Micro, scale: float) -> float:
    loss, _ = task.loss(model, batch)
    (loss * scale).backward()
    return float(loss.detach())


if __name__ == "__main__":
    main()
