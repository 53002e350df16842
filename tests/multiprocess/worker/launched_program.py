"""A program as a person would write it, without a trainer: what `launch` promises it is checked on every rank."""

import os
import random
import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from argosy.worker.launch import launch

if "THREAD" in os.environ:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


@dataclass
class Optimizer:
    learning_rate: float = 0.1


@dataclass
class Config:
    depth: int = 8
    betas: tuple[float, float] = (0.9, 0.95)
    optimizer: Optimizer = field(default_factory=Optimizer)


def main(run, config):
    drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
    product = torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
    assert product[0, 0] == 64
    rank = os.environ.get("RANK", "0")
    facts = [config.depth, config.optimizer.learning_rate, torch.get_num_threads(), run.seed]
    (run.directory / f"facts-{rank}").write_text(f"{facts} {drawn} {run.resume_from}")
    (run.directory / f"pid-{rank}").write_text(str(os.getpid()))
    run.once(lambda: print("once"))
    for step in range(2):
        run.log(loss=1.0 / (step + 2), step=step)
    if config.depth == 13:
        sys.exit(13)


if __name__ == "__main__":
    launch(main, Config)
