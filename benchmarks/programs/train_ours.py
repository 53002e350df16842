"""Our trainer on the same task, stepping when the benchmark says so: `python train_ours.py -n RANKS`, BENCH_MODE, BENCH_LAYOUT and BENCH_RECOVERY in the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import argosy as ar

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_task as task
from train_baton import Baton


def main(run: ar.Run) -> None:
    trainer = run.trainer(
        model=task.model(),
        data=task.source(),
        loss=task.loss,
        optimizer=task.optimizer,
        batch_size=task.LANES * task.ROWS_PER_LANE,
        lanes=task.LANES,
        mode=os.environ.get("BENCH_MODE", "exact"),
        layout=os.environ.get("BENCH_LAYOUT", "shared"),
        recovery=os.environ.get("BENCH_RECOVERY", "on") == "on",
        # The peers save nothing either.
        checkpoints=None,
        save_at_end=False,
    )
    baton = Baton(run.gang.rank)
    for step in trainer.steps(1 << 30):
        if not baton.before():
            break
        baton.after(step().loss)


if __name__ == "__main__":
    ar.launch(main)
