"""A training whose state is large for how slowly its saves may be written, so that the last one takes several times as long as a short grace.

RECORD names a directory: each process makes a file there when it has made three steps, and makes no more until it is asked to stop.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

import argosy as ar

STEPS = 3
WIDTH = 2048
BYTES_PER_SECOND = 4 << 20
"""A block of a checkpoint every two seconds; there are six."""


class Rows(torch.utils.data.Dataset):
    fingerprint = "rows"

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.full((WIDTH,), float(number))


def main(run):
    trainer = run.trainer(
        model=nn.Linear(WIDTH, WIDTH, bias=False),
        data=ar.data.as_source(Rows(), names=("row",)),
        loss=lambda model, batch: (model(batch.row).square().mean(), batch.rows),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        batch_size=4,
        lanes=2,
        checkpoints=ar.Checkpoints(
            every=1_000_000,
            writing=ar.checkpoint.Writing(bytes_per_second=BYTES_PER_SECOND),
        ),
    )
    for step in trainer.steps(1_000_000):
        if step.index == STEPS:
            (Path(os.environ["RECORD"]) / str(os.getpid())).touch()
        while step.index >= STEPS and not run.gang.stopping:
            time.sleep(0.002)
        step()


if __name__ == "__main__":
    ar.launch(main)
