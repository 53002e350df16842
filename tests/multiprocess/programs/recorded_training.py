"""A small training run that writes down what it commits, and waits at a gate: events of a test fall where they should.

RECORD names a directory. Each process appends `step loss` to its own file there, the loss in all its bits, and `digest SHA-256` at its end. No rank begins
a step that the number in the file `gate` does not allow; without the file all are allowed. Config: how many steps, and a lane that raises or uses up the
memory.
"""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import argosy as ar

RECORD = Path(os.environ["RECORD"])
ROWS, WIDTH = 256, 8
MIB = 1 << 20


@dataclass
class Config:
    steps: int = 40
    raises_at: int = -1
    """In this step lane 5 raises, whoever computes it."""
    eats_at: int = -1
    """In this step whoever computes lane 5 first takes memory until the kernel ends it."""
    starves_at: int = -1
    """In this step whoever computes lane 5 first asks for memory that it is not given."""
    starves_again: bool = False
    """Everybody who computes that lane."""
    hang_seconds: float = 1.0


class Rows(torch.utils.data.Dataset):
    fingerprint = "rows"

    def __init__(self):
        made = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(ROWS, WIDTH, generator=made)
        self.labels = torch.randint(0, 4, (ROWS,), generator=made)

    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        return self.inputs[number], self.labels[number]


def main(run, config):
    def loss(model, batch):
        place = batch.index, batch.lane
        if place == (config.raises_at, 5):
            raise ValueError("lane 5 is spoilt")
        if place == (config.eats_at, 5) and is_first("eaten"):
            eat()
        if place == (config.starves_at, 5) and (is_first("starved") or config.starves_again):
            starve()
        logits = model(batch.inputs)
        return functional.cross_entropy(logits, batch.labels, reduction="sum"), len(logits)

    trainer = run.trainer(
        model=nn.Sequential(
            nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4)
        ),
        data=Rows(),
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batch_size=32,
        lanes=8,
        clip=1.0,
        schedule=ar.schedules.cosine(steps=config.steps, warmup=5),
        ema=0.9,
        hang_seconds=config.hang_seconds,
    )
    with (RECORD / f"{os.getpid()}.steps").open("a", buffering=1) as record:
        for step in trainer.steps(config.steps):
            wait_for_gate(run, step.index)
            run.state["steps"] = run.state.get("steps", 0) + 1
            result = step()
            record.write(f"{step.index} {result.loss.hex()} {run.gang.world_size}\n")
        assert run.state["steps"] == config.steps
        record.write(f"digest {trainer.digest()}\n")


def is_first(what):
    try:
        (RECORD / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def eat():
    held = [bytearray(b"x" * MIB) for _ in range(2048)]
    raise AssertionError(f"{len(held)} MiB were given: there is no limit")


def starve():
    """As on a host without memory: what is asked for is refused."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    # The heap of a new thread reserves 64 MiB of addresses: with no more than that left there may be none for a save.
    resource.setrlimit(resource.RLIMIT_AS, (used + 256 * MIB, most))
    bytearray(1024 * MIB)


def wait_for_gate(run, step):
    while not run.gang.stopping:
        try:
            if step < int((RECORD / "gate").read_text() or 0):
                return
        except FileNotFoundError:
            return
        time.sleep(0.002)


if __name__ == "__main__":
    ar.launch(main, Config)
