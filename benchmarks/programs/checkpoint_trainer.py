"""Saves of our trainer in the benchmark `checkpoint`, on the model of checkpoint_sides.py: `python checkpoint_trainer.py -n RANKS`, BENCH_MEBIBYTES and BENCH_FORM in the environment.

`pinned` saves when a line on the socket says so, and answers what that cost. `memory` writes down how long the trainer took to be made, on a model that is there: from nothing, by ranks that replace killed ones, or from the disk.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

import argosy as ar

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint_task import WIDTH, Saving, one_turn


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(place))}


def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    out = model(batch.x)
    return out.square().sum(), out.numel()


def make_model() -> torch.nn.Module:
    mebibytes = int(os.environ["BENCH_MEBIBYTES"])
    layers = max(1, mebibytes * (1 << 20) // (WIDTH * WIDTH * 12))
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def trainer_of(run: ar.Run, model: torch.nn.Module) -> Any:
    return run.trainer(
        model=model,
        data=Rows(),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=False),
        batch_size=8,
        lanes=2,
        checkpoints=None,
    )


def pinned(run: ar.Run) -> None:
    """Each turn as in checkpoint_task.py."""
    trainer = trainer_of(run, make_model())
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["BENCH_SOCKET"])
    lines = link.makefile("rb")
    link.sendall(json.dumps({"rank": 0, "pid": os.getpid()}).encode() + b"\n")
    steps = iter(trainer.steps(1 << 30))

    def step() -> None:
        next(steps)()

    step()
    saver = trainer.parts.saver

    def save() -> Saving:
        trainer.save()
        return Saving(lambda: not saver.is_saving, finish)

    def finish() -> float:
        saver.wait()
        return 0.0

    while lines.readline():
        answer = one_turn(step, save) | {"step": saver.checkpointer.steps()[-1]}
        link.sendall(json.dumps(answer).encode() + b"\n")


def memory(run: ar.Run) -> None:
    """Two steps; then all ranks end by SIGKILL, once, and their replacements finish."""
    model = make_model()
    begun, cpu = time.perf_counter(), time.process_time()
    trainer = trainer_of(run, model)
    begins_at = trainer.step  # which has the committed version mapped, whole
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    record = Path(os.environ["BENCH_RECORD"])
    with record.open("a") as file:
        said = {"seconds": seconds, "cpu": cpu, "step": begins_at, "rank": run.gang.rank}
        file.write(json.dumps(said) + "\n")
    steps = int(os.environ.get("BENCH_STEPS", "4"))
    for step in trainer.steps(steps):
        if step.index == 2 and not record.with_suffix(f".killed{run.gang.rank}").exists():
            record.with_suffix(f".killed{run.gang.rank}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step()
    if trainer.is_first:
        with record.open("a") as file:
            file.write(json.dumps({"digest": trainer.digest(), "step": trainer.step}) + "\n")


def main(run: ar.Run) -> None:
    {"pinned": pinned, "memory": memory}[os.environ["BENCH_FORM"]](run)


if __name__ == "__main__":
    ar.launch(main)
