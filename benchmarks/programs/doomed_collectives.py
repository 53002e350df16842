"""One trial per line of stdin: fork ranks, let them run random collectives, kill one at a random moment, tell what the others saw.

`python doomed_collectives.py SIZE`; a line on stdin is a seed. One JSON line per trial: how long the survivors took from the kill to their
typed error, whether the error named the victim, and what a survivor still held after it had destroyed its group.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import argosy.move.groups  # noqa: F401 - registers the backend
from argosy.errors import PeerLost


def some_collective(choice: random.Random, rank: int, size: int) -> None:
    count = choice.choice((1, 1000, 100_000, 2_000_000))
    name = choice.choice(
        ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
    )
    is_async = choice.random() < 0.3
    tensor = torch.ones(count * size)
    if name == "all_reduce":
        work = dist.all_reduce(tensor, async_op=is_async)
    elif name == "all_gather":
        work = dist.all_gather_single(tensor, torch.ones(count), async_op=is_async)
    elif name == "reduce_scatter":
        work = dist.reduce_scatter_single(torch.empty(count), tensor, async_op=is_async)
    elif name == "broadcast":
        work = dist.broadcast(tensor, choice.randrange(size), async_op=is_async)
    elif name == "all_to_all":
        work = dist.all_to_all_single(torch.empty_like(tensor), tensor, async_op=is_async)
    else:
        work = dist.barrier(async_op=is_async)
    if work is not None:
        work.wait()


def member(seed: int, rank: int, size: int, scratch: Path) -> None:
    torch.set_num_threads(1)
    choice = random.Random(seed)
    dist.init_process_group(
        "argosy",
        store=dist.FileStore(str(scratch / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
    )
    (scratch / f"ready{rank}").touch()
    said = {"error": "none"}
    try:
        while True:
            some_collective(choice, rank, size)
    except PeerLost as lost:
        said = {"error": "PeerLost", "rank": lost.rank, "at": time.monotonic()}
    except BaseException as failure:  # noqa: BLE001 - whatever it is, it is the trial's result
        said = {"error": repr(failure), "at": time.monotonic()}
    dist.destroy_process_group()
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    said["left"] = [link for link in links if "argosy" in link or "pidfd" in link]
    (scratch / f"{rank}.part").write_text(json.dumps(said))
    (scratch / f"{rank}.part").rename(scratch / f"{rank}.json")


def trial(seed: int, size: int) -> dict[str, object]:
    choice = random.Random(seed + 1)
    with tempfile.TemporaryDirectory() as name:
        scratch, pids = Path(name), []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                try:
                    member(seed, rank, size, scratch)
                finally:
                    os._exit(0)
            pids.append(pid)
        try:
            return watch(choice, size, scratch, pids)
        finally:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    pass


def watch(choice: random.Random, size: int, scratch: Path, pids: list[int]) -> dict[str, object]:
    deadline = time.monotonic() + 20
    while not all((scratch / f"ready{rank}").exists() for rank in range(size)):
        if time.monotonic() > deadline:
            return {"is_typed": False, "why": "the ranks did not start"}
        time.sleep(0.001)
    victim = choice.randrange(size)
    time.sleep(choice.random() * 0.05)
    os.kill(pids[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    os.waitpid(pids[victim], 0)
    others = [rank for rank in range(size) if rank != victim]
    while not all((scratch / f"{rank}.json").exists() for rank in others):
        if time.monotonic() > killed_at + 10:
            return {"is_typed": False, "why": "no error within 10 s"}
        time.sleep(0.001)
    said = [json.loads((scratch / f"{rank}.json").read_text()) for rank in others]
    is_typed = all(entry["error"] == "PeerLost" and entry["rank"] == victim for entry in said)
    return {
        "is_typed": is_typed,
        "seconds": max(entry.get("at", killed_at + 99) for entry in said) - killed_at,
        "leaks": sum(len(entry["left"]) for entry in said),
        "why": "" if is_typed else [entry["error"] for entry in said],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(trial(int(line), int(sys.argv[1]))), flush=True)
