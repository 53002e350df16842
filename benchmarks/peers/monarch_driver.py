"""Runs inside Monarch's own environment: a driver with Monarch imported, one request per line of stdin.

`launch N` spawns a mesh of N processes on this host with one actor each; they import torch, join over Gloo and add up
once. Answers are lines of JSON after the mark `@`.
"""

import json
import socket
import sys
import time

from monarch.actor import Actor, current_rank, endpoint, this_host


def answer(**fields: object) -> None:
    print("@" + json.dumps(fields), flush=True)


class Rank(Actor):
    @endpoint
    def first_allreduce(self, world_size: int, port: int) -> tuple[float, int]:
        import torch
        import torch.distributed as dist

        rank = current_rank().rank
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
        )
        value = torch.full((1024,), float(rank + 1))
        dist.all_reduce(value)
        total = float(value.min()) if value.min() == value.max() else float("nan")
        done = time.time_ns()
        dist.destroy_process_group()
        return total, done


def launch(count: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.time_ns()
    processes = this_host().spawn_procs({"gpus": count})
    ranks = processes.spawn("rank", Rank)
    results = [value for _, value in ranks.first_allreduce.call(count, port).get()]
    seconds = (max(done for _, done in results) - started) / 1e9
    processes.stop().get()
    answer(seconds=seconds, totals=[total for total, _ in results])


def main() -> None:
    from importlib.metadata import version

    answer(ready=True, version=version("torchmonarch"))
    for line in sys.stdin:
        verb, count = line.split()
        {"launch": launch}[verb](int(count))


if __name__ == "__main__":
    main()
