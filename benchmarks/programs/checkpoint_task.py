"""What all sides of the benchmark `checkpoint` train that save beside training, and a turn of it: steps as usual, a save, steps until it is over.

A side is a process that waits for lines on a socket: `save` is a turn, answered with what it cost; `check` saves, changes the state at once, loads what was saved and
answers which tensors are not what they were. Torch alone: peers have environments without ours.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

WIDTH = 1024
USUAL_STEPS = 4


class Task:
    """A model whose parameters and moments have about so many bytes, and a step of training."""

    def __init__(self, mebibytes: int) -> None:
        torch.manual_seed(1)
        layers = max(1, mebibytes * (1 << 20) // (WIDTH * WIDTH * 12))
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.batch = torch.randn(8, WIDTH)
        self.lock: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Held while the optimizer steps, where a side wants that."""
        self.waited_seconds = 0.0
        """For the lock, in all steps so far."""
        self.step()

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        begun = time.perf_counter()
        with self.lock():
            self.waited_seconds += time.perf_counter() - begun
            self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same tensors, flat, as the other sides want them."""
        found = {name: value.detach() for name, value in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for member, value in self.optimizer.state[parameter].items():
                found[f"{name}/{member}"] = value
        return found

    @property
    def num_bytes(self) -> int:
        return sum(one.nbytes for one in self.tensors().values())


class Saving(NamedTuple):
    """A save that was begun."""

    is_done: Callable[[], bool]
    finish: Callable[[], float]
    """Waits for its end, and says how long steps have waited for it besides the call."""


def one_turn(step: Callable[[], object], save: Callable[[], Saving]) -> dict[str, float]:
    """Seconds: `stall`, the call and the waits before the optimizer's steps; `lost`, all that steps took longer until the save was over than the usual ones before and after it."""
    usual = seconds_of(step)
    begun = time.perf_counter()
    saving = save()
    called, count = time.perf_counter() - begun, 0
    while count < 3 or not saving.is_done():
        step()
        count += 1
    spent = time.perf_counter() - begun
    stall = called + saving.finish()
    middle = statistics.median(usual + seconds_of(step))
    return {"stall": stall, "lost": spent - count * middle, "usual": middle}


def seconds_of(step: Callable[[], object]) -> list[float]:
    """Of each of some steps without a save."""
    found = []
    for _ in range(USUAL_STEPS):
        begun = time.perf_counter()
        step()
        found.append(time.perf_counter() - begun)
    return found


def find_wrong(task: Task, save: Callable[[], Saving], load: Callable[[], object]) -> list[str]:
    """Names of the tensors that a save has otherwise than they were when it was asked for; the state is changed at once."""
    wanted = {name: value.clone() for name, value in task.tensors().items()}
    saving = save()
    task.step()
    saving.finish()
    load()
    return [name for name, value in task.tensors().items() if not torch.equal(value, wanted[name])]


def take_turns(
    task: Task, save: Callable[[], Saving], load: Callable[[], object] | None = None
) -> None:
    """Do what the lines on the socket say, until there are no more."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["BENCH_SOCKET"])
    lines = link.makefile("rb")
    link.sendall(json.dumps({"rank": 0, "pid": os.getpid()}).encode() + b"\n")
    for line in lines:
        answer: dict[str, Any]
        if line.strip() == b"check" and load is not None:
            answer = {"wrong": find_wrong(task, save, load)}
        else:
            answer = one_turn(task.step, save)
        link.sendall(json.dumps(answer).encode() + b"\n")
