"""Data-parallel training whose state outlives its ranks: `argosy run -n 2 examples/shared_step.py`.

Gradients, the update and the committed versions of the weights lie in memory that the run keeps. Kill a rank, or let one kill itself with
`-- --die-at 20`: the gang starts again, goes on from the last committed version and ends with the same bits, as it does with any number of ranks.
"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist

from argosy.errors import RoundOver
from argosy.move import Layout, Parameter, Round, arenas, exchange, prove

LANES = 4  # the batch is cut into lanes; their sums do not depend on who computes which
SECONDS = 60


class Trainer:
    def __init__(self, model: torch.nn.Module, rank: int, size: int) -> None:
        self.model = model
        self.inputs, self.wanted = torch.randn(LANES, 32, 8), torch.randn(LANES, 32, 1)
        parameters = tuple(Parameter(name=n, numel=p.numel()) for n, p in model.named_parameters())
        self.layout = Layout(num_lanes=LANES, most_ranks=8, parameters=parameters)
        self.shared = exchange.open("step", self.layout)
        self.state = self.shared.state
        self.weights = self.open_weights(rank)  # a row for each version slot
        self.gradients = torch.zeros(self.layout.num_elements)
        self.lanes = range(LANES * rank // size, LANES * (rank + 1) // size)
        names = self.layout.share(rank, size)  # this rank updates these; perhaps none
        self.mine = [page for name in names for page in self.layout.pages_of(name)]

    def open_weights(self, rank: int) -> torch.Tensor:
        """Made once, in the first generation; found again by every later rank."""
        shape = (self.layout.num_versions, self.layout.num_elements)
        arena = arenas.create("weights", 4 * shape[0] * shape[1], scope="run")
        if rank == 0 and "versions" not in arena.names():
            weights = arena.empty(shape, torch.float32, name="versions")
            for name, parameter in self.model.named_parameters():
                weights[0, slice(*self.layout.span(name))] = parameter.detach().flatten()
        dist.barrier()
        return arena.tensor("versions")

    def step(self, version: int, slot: int) -> str:
        deadline = time.monotonic() + SECONDS
        self.load(slot)
        this = Round(version, version)
        for block in self.layout.blocks(self.lanes.start, len(self.lanes)):
            claim = self.shared.claim(this, block)
            if claim is not None:  # else somebody has finished it, dead or alive
                self.backward_into(claim, range(block.first, block.stop))
        gathered = self.shared.wait_lanes(this, deadline=deadline)
        partials = self.shared.reduce(gathered, self.mine, self.gradients)
        self.shared.vote(this, self.mine, partials)
        norm = sum(self.shared.wait_votes(this, deadline=deadline)) ** 0.5 / LANES
        left = sorted(set(self.mine) & set(self.state.undone(version + 1)))
        if left:
            self.update(left, slot, self.state.begin(version + 1, deadline=deadline))
            self.state.mark_done(version + 1, left)
        self.state.wait_flip(version + 1, deadline=deadline)
        self.state.mark_refreshed(version + 1, self.mine)
        self.state.wait_refreshed(version + 1, deadline=deadline)
        total, count = gathered.terms["loss"]
        return f"step {version} loss {total / count:.4f} norm {norm:.4f}"

    def load(self, slot: int) -> None:
        for name, parameter in self.model.named_parameters():
            row = self.weights[slot, slice(*self.layout.span(name))]
            parameter.data.copy_(row.view_as(parameter))

    def backward_into(self, claim: exchange.SlotClaim, lanes: range) -> None:
        """Lane by lane: a block's sum must not depend on how lanes are dealt out."""
        claim.zero()
        total = 0.0
        for lane in lanes:
            loss = (self.model(self.inputs[lane]) - self.wanted[lane]).square().mean()
            self.model.zero_grad()
            loss.backward()
            for name, parameter in self.model.named_parameters():
                claim.gradient(name).add_(parameter.grad.flatten())
            total += loss.item()
        self.shared.publish(claim, terms={"loss": (total, float(len(lanes)))})

    def update(self, pages: list[int], old: int, new: int) -> None:
        """From one version's row into another's, never the other way round."""
        for part in (slice(*self.layout.bounds(page)) for page in pages):
            self.weights[new, part] = self.weights[old, part] - 0.05 / LANES * self.gradients[part]


def main(num_steps: int, die_at: int | None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    trainer = Trainer(model, rank, size)
    generation = int(os.environ.get("ARGOSY_GENERATION", "1"))
    with prove(dist.group.WORLD.get_group_store(), rank, size, timeout=SECONDS) as found:
        members = {rank: -1, **found.pidfds}  # who must live while this rank waits
        trainer.shared.enter(generation, rank, members, deadline=time.monotonic() + SECONDS)
        while (current := trainer.state.current())[0] < num_steps:
            if generation == 1 and current[0] == die_at and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                told = trainer.step(*current)
            except RoundOver:
                continue  # the others needed nothing more of this rank
            if rank == 0 and current[0] % 20 == 0:
                print(told, flush=True)
        dist.barrier()
    if rank == 0:
        version, slot = trainer.state.current()
        total = trainer.weights[slot].double().sum().item()
        print(f"version {version}, sum of weights {total:.12f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--die-at", type=int, help="the last rank kills itself at this step, once")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.die_at)
