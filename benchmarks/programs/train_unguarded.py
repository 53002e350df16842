"""The same lanes, slots and sums as the trainer's, without what makes a step a transaction: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.

Weights are updated in place by their owners, moments are private, nothing is voted on, recorded or watched: a death in the middle would spoil the run. What the
trainer takes longer than this is the price of fault tolerance.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.move import Layout, Parameter, Round, arenas, exchange, prove

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_task as task
from train_baton import Baton

SECONDS = 3600.0


class Unguarded:
    def __init__(self, rank: int, size: int) -> None:
        self.model = task.model()
        self.named = dict(self.model.named_parameters())
        parameters = tuple(Parameter(name=n, numel=p.numel()) for n, p in self.named.items())
        self.layout = Layout(
            num_lanes=task.LANES, most_ranks=size, parameters=parameters, terms=("loss",)
        )
        self.found = prove(dist.group.WORLD.get_group_store(), rank, size, timeout=SECONDS)
        made = weights = None
        if self.found.is_leader:
            made = exchange.open("step", self.layout, scope="process")
            weights = arenas.create("weights", 4 * self.layout.num_elements + (1 << 16))
            weights.empty((self.layout.num_elements,), name="weights")
        self.shared = exchange.attach(
            self.found.share(made and made.fileno(), timeout=SECONDS), self.layout
        )
        given = self.found.share(weights and weights.fileno(), timeout=SECONDS)
        self.bind(arenas.attach(given).tensor("weights"))
        self.gradients = torch.zeros(self.layout.num_elements)
        owned = self.layout.share(rank, size)
        self.pages = [page for name in owned for page in self.layout.pages_of(name)]
        self.owned = {name: self.named[name] for name in owned}
        self.optimizer = task.optimizer(self.owned.values())
        members = {rank: -1} | self.found.pidfds
        self.shared.enter(0, rank, members, deadline=time.monotonic() + SECONDS)

    def bind(self, flat: torch.Tensor) -> None:
        """Let the model compute with the shared weights; all ranks begin with the same."""
        for name, parameter in self.named.items():
            place = flat[slice(*self.layout.span(name))].view_as(parameter)
            place.copy_(parameter.detach())
            parameter.data = place
        dist.barrier()

    def step(self, index: int, lanes: range, batches: list[task.Micro]) -> float:
        deadline = time.monotonic() + SECONDS
        state = self.shared.state
        version = state.current()[0]
        this = Round(version, index)
        for block in self.layout.blocks(lanes.start, len(lanes)):
            claim = self.shared.claim(this, block)
            claim.zero()
            for name, parameter in self.named.items():
                parameter.grad = claim.gradient(name).view_as(parameter)
            total = 0.0
            for lane in range(block.first, block.stop):
                loss, _ = task.loss(self.model, batches[lane - lanes.start])
                (loss / task.TOKENS_PER_STEP).backward()
                total += loss.item()
            count = float(block.stop - block.first)
            self.shared.publish(claim, terms={"loss": (total, count)})
        # All lanes are computed now: nobody reads the weights while their owners change them.
        gathered = self.shared.wait_lanes(this, deadline=deadline)
        self.shared.reduce(gathered, self.pages, self.gradients)
        for name, parameter in self.named.items():
            parameter.grad = None
            if name in self.owned:
                parameter.grad = self.gradients[slice(*self.layout.span(name))].view_as(parameter)
        self.optimizer.step()
        state.begin(version + 1, deadline=deadline)
        state.mark_done(version + 1, self.pages)
        state.wait_flip(version + 1, deadline=deadline)
        return float(gathered.terms["loss"][0]) / task.TOKENS_PER_STEP


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lanes = range(task.LANES * rank // size, task.LANES * (rank + 1) // size)
    batches = task.batches(lanes)
    trainer = Unguarded(rank, size)
    baton = Baton(rank)
    index = 0
    while baton.before():
        baton.after(trainer.step(index, lanes, batches[index % len(batches)]))
        index += 1
    trainer.shared.close()
    trainer.found.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
