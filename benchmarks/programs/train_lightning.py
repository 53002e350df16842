"""Lightning's Trainer on the same task, one process; logging, checkpoints, progress bar and summary are off."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_task as task
from train_baton import Baton


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = task.model()
        self.total = 0.0

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss, count = task.loss(self.inner, batch)
        mean = loss / count
        self.total += mean.item()
        return mean

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return task.optimizer(self.parameters())


class Turns(lightning.Callback):
    """Waits for the benchmark before the first micro-batch of a step."""

    def __init__(self) -> None:
        self.baton = Baton(0)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, module: Any, batch: Any, index: int
    ) -> int | None:
        if index % task.LANES == 0 and not self.baton.before():
            trainer.should_stop = True
            return -1
        return None

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index % task.LANES == task.LANES - 1:
            self.baton.after(module.total / task.LANES)
            module.total = 0.0


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    flat = [batch for step in task.batches(range(task.LANES)) for batch in step]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        accumulate_grad_batches=task.LANES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Turns()],
    )
    trainer.fit(Module(), DataLoader(task.Repeated(flat), batch_size=None))


if __name__ == "__main__":
    main()
