"""A gang that survives `kill -9` of a member without restarting the others.

    argosy run -n 4 --spares 1 examples/elastic_reform.py

Every rank adds the same number to its state in each step, by an all-reduce over Gloo. Kill one while it runs: the survivors keep
their process, their memory and their state, and go on with whoever takes the empty place.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import argosy
from argosy.errors import GenerationChanged

STEPS = int(os.environ.get("STEPS", "200"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.05"))


def main():
    gang = (
        argosy.join()
    )  # from here on a peer's death is told, and this process is not restarted for it
    state = torch.zeros(2, dtype=torch.int64)  # (steps done, sum of all that was reduced)
    while state[0] < STEPS:
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=30))
            state = newest(state)
            print(f"{gang} from step {state[0]}, pid {os.getpid()}", flush=True)
            while state[0] < STEPS:
                gang.check()
                state = step(state)
                gang.step(int(state[0]))
                time.sleep(STEP_SECONDS)
        except (GenerationChanged, RuntimeError) as error:
            # Leave first: peers that wait for us in a collective must see it fail.
            leave()
            # A collective fails a moment before or after the news; without any news the error is our own.
            if not gang.wait_changed(timeout=10):
                raise
            print(f"{gang}: {gang.reason}; {type(error).__name__} at step {state[0]}", flush=True)
            gang.rejoin()
    dist.barrier()
    leave()
    print(f"rank {gang.rank} done: {state.tolist()}", flush=True)


def step(state):
    """One step; the state changes only when the collective has succeeded."""
    share = torch.ones((), dtype=torch.int64)
    dist.all_reduce(share)
    return torch.stack([state[0] + 1, state[1] + share // dist.get_world_size()])


def newest(state):
    """The state of the member that got furthest: a newcomer has none, and a survivor may lack the last step."""
    states = [torch.zeros_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(states, state)
    return max(states, key=lambda other: int(other[0]))


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
