"""Our trainer on the same task, with every commit on record and, if asked for, one fault of the program's own.

Each process appends `step time_ns rank world_size loss_bits tokens` to its own file after every commit; the last line is `digest SHA-256`. BENCH_PACE are
seconds of rest after each step, for events that must fall into the run. BENCH_FAULT names
what one rank does once, whoever it is, in step BENCH_FAULT_STEP at lane BENCH_FAULT_LANE: a file in BENCH_DIR says that it has happened.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import argosy as ar

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_task as task

OUT = Path(os.environ["BENCH_DIR"])
STEPS = int(os.environ.get("BENCH_STEPS", "1000000"))
PACE = float(os.environ.get("BENCH_PACE", "0"))
FAULT = os.environ.get("BENCH_FAULT", "")
FAULT_AT = (
    int(os.environ.get("BENCH_FAULT_STEP", "-1")),
    int(os.environ.get("BENCH_FAULT_LANE", "0")),
)


def main(run: ar.Run) -> None:
    trainer = run.trainer(
        model=task.model(),
        data=task.source(),
        loss=loss,
        optimizer=task.optimizer,
        batch_size=task.LANES * task.ROWS_PER_LANE,
        lanes=task.LANES,
        save_at_end=False,
    )
    with (OUT / f"{os.getpid()}.steps").open("a", buffering=1) as record:
        for step in trainer.steps(STEPS):
            result = step()
            place = f"{run.gang.rank} {run.gang.world_size}"
            record.write(
                f"{step.index} {time.time_ns()} {place} {result.loss.hex()} {int(result.tokens)}\n"
            )
            time.sleep(PACE)
        record.write(f"digest {trainer.digest()}\n")


def loss(model: torch.nn.Module, batch: Any) -> Any:
    is_due = bool(FAULT) and (batch.index, batch.lane) == FAULT_AT and is_first_time()
    if is_due and FAULT in FAULTS:
        FAULTS[FAULT]()
    total, count = task.loss(model, batch)
    return (total * float("nan") if is_due and FAULT == "nan" else total), count


def is_first_time() -> bool:
    try:
        os.close(os.open(OUT / "fault", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    (OUT / "fault").write_text(f"{os.getpid()} {time.time_ns()}")
    return True


def raise_error() -> None:
    raise RuntimeError("a fault that does not come again")


def lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hold_the_gil() -> None:
    # PyDLL keeps the interpreter's lock during the call: no thread of this process goes on.
    ctypes.PyDLL(None).sleep(100000)


def be_slow() -> None:
    time.sleep(0.5)


def die_for_memory() -> None:
    # What the kernel's killer does: SIGKILL in the middle of an allocation.
    torch.empty(1 << 24).fill_(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    "exception": raise_error,
    "deadlock": lock_twice,
    "gil": hold_the_gil,
    "slow": be_slow,
    "memory": die_for_memory,
}

if __name__ == "__main__":
    ar.launch(main)
