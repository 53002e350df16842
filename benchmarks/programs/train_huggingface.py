"""Hugging Face's Trainer on the same task, one process; logging, saving and evaluation are off."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_task as task
from train_baton import Baton


class Model(torch.nn.Module):
    """Gives its loss itself, as the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = task.model()
        self.total = 0.0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss, count = task.loss(self.inner, task.Micro(tokens, labels))
        mean = loss / count
        self.total += mean.item()
        return {"loss": mean}


class Turns(TrainerCallback):
    """Waits for the benchmark before each step."""

    def __init__(self, model: Model) -> None:
        self.baton = Baton(0)
        self.model = model

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.baton.before():
            os._exit(0)  # between two steps the Trainer cannot be asked to stop

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.baton.after(self.model.total / task.LANES)
        self.model.total = 0.0


class Sequential(Trainer):
    """The batches in the order of all other sides."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=None)


def main() -> None:
    torch.set_num_threads(1)
    steps = task.batches(range(task.LANES))
    flat = [{"tokens": b.tokens, "labels": b.labels} for step in steps for b in step]
    model = Model()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=1 << 30,
            per_device_train_batch_size=task.ROWS_PER_LANE,
            gradient_accumulation_steps=task.LANES,
            learning_rate=task.LEARNING_RATE,
            weight_decay=0.0,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            eval_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        trainer = Sequential(
            model=model,
            args=arguments,
            train_dataset=task.Repeated(flat),
            callbacks=[Turns(model)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
