"""Runs inside Ray's own environment: a driver already connected to a running Ray, one request per line of stdin.

`launch N` makes N actors that import torch, join over Gloo and add up once; `tasks N` runs N tasks that each start a
process of their own (max_calls=1). Answers are lines of JSON after the mark `@`, for Ray itself prints to stdout too.
"""

import json
import os
import socket
import sys
import time

import ray


def answer(**fields: object) -> None:
    print("@" + json.dumps(fields), flush=True)


@ray.remote(num_cpus=0)
class Rank:
    def first_allreduce(self, rank: int, world_size: int, port: int) -> tuple[float, int]:
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
        )
        value = torch.full((1024,), float(rank + 1))
        dist.all_reduce(value)
        total = float(value.min()) if value.min() == value.max() else float("nan")
        done = time.time_ns()
        dist.destroy_process_group()
        return total, done


@ray.remote(num_cpus=1, max_calls=1)
def no_operation() -> int:
    return os.getpid()


def launch(count: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.time_ns()
    actors = [Rank.remote() for _ in range(count)]
    results = ray.get(
        [actor.first_allreduce.remote(rank, count, port) for rank, actor in enumerate(actors)]
    )
    seconds = (max(done for _, done in results) - started) / 1e9
    for actor in actors:
        ray.kill(actor)
    answer(seconds=seconds, totals=[total for total, _ in results])


def tasks(count: int) -> None:
    started = time.perf_counter()
    pids = ray.get([no_operation.remote() for _ in range(count)])
    answer(seconds=time.perf_counter() - started, processes=len(set(pids)), count=len(pids))


def main() -> None:
    # Eight logical CPUs, so that Ray has eight workers started beforehand: the most favourable setting for it.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.get([no_operation.remote() for _ in range(2)])
    answer(ready=True, version=ray.__version__)
    for line in sys.stdin:
        verb, count = line.split()
        {"launch": launch, "tasks": tasks}[verb](int(count))
    ray.shutdown()


if __name__ == "__main__":
    main()
