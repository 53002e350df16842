"""Sides of the benchmark `checkpoint` in one process: ours, torch's distributed checkpoint, torch.save, and the bare disk; prints a JSON line.

`python checkpoint_sides.py SECTION ROUNDS MEBIBYTES DIRECTORY`: within a round the sides take turns, in another order each time, on one AdamW state.
What a side saved is loaded and compared before its times count.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._state_dict_utils import _create_cpu_state_dict
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from argosy.checkpoint import Checkpointer

WIDTH = 1024
BLOCK = 8 << 20
THREADS = 4
Times = dict[str, list[float]]


class Task:
    """A model whose parameters and moments have about so many bytes, and a step of training."""

    def __init__(self, mebibytes: int) -> None:
        torch.manual_seed(1)
        layers = max(1, mebibytes * (1 << 20) // (WIDTH * WIDTH * 12))
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.batch = torch.randn(8, WIDTH)
        self.step()

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
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


class Disk:
    """The bare disk: blocks of 8 MiB past the page cache, four threads, one file."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.blocks = num_bytes // BLOCK
        self._memory = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]
        for memory in self._memory:
            memory.write(os.urandom(1 << 16) * (BLOCK >> 16))

    def write(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(descriptor, 0, self.blocks * BLOCK)
        self._each(lambda memory, at: os.pwrite(descriptor, memory, at))
        os.fdatasync(descriptor)
        os.close(descriptor)

    def read(self) -> None:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        self._each(lambda memory, at: os.preadv(descriptor, [memory], at))
        os.close(descriptor)

    def _each(self, work: Callable[[mmap.mmap, int], int]) -> None:
        def run(number: int) -> None:
            for block in range(number, self.blocks, THREADS):
                if work(self._memory[number], block * BLOCK) != BLOCK:
                    raise OSError("a short transfer")

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(run, range(THREADS)))


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, seconds of this process's processors)"""
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - cpu


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def forget(path: Path) -> None:
    """Out of the page cache: the next read is the disk's."""
    for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def check(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], side: str) -> None:
    for name, value in wanted.items():
        if not torch.equal(value, found[name]):
            raise SystemExit(f"{side}: {name} is not what was saved")


def rotated(sides: dict[str, Callable[[], None]], turn: int) -> list[Callable[[], None]]:
    order = list(sides.values())
    return order[turn % len(order) :] + order[: turn % len(order)]


def measure_saves(task: Task, rounds: int, directory: Path) -> dict[str, Any]:
    """Durable saves and cold loads."""
    seconds: Times = {}
    cpu: Times = {}
    tensors = task.tensors()
    disk = Disk(directory / "raw", task.num_bytes)
    ours = Checkpointer(directory / "ours", run="bench")
    beside = Checkpointer(directory / "beside", run="bench")
    turn = 0

    def note(side: str, spent: tuple[float, float]) -> None:
        if turn:
            seconds.setdefault(side, []).append(spent[0])
            cpu.setdefault(side, []).append(spent[1])

    def save_ours() -> None:
        note("ours", timed(lambda: ours.save(turn, task.parts)))

    def save_beside() -> None:
        handle = beside.save(turn, task.parts, wait=False)
        handle.wait()
        spent = handle.statistics()
        if turn:
            note("writer", (spent["writer_seconds"], spent["writer_cpu_seconds"]))

    def save_dcp() -> None:
        note("dcp", timed(lambda: dcp_save(tensors, checkpoint_id=directory / "dcp", no_dist=True)))

    sides = {
        "ours": save_ours,
        "writer": save_beside,
        "raw": lambda: note("raw", timed(disk.write)),
        "dcp": save_dcp,
        "torch": lambda: note("torch", timed(lambda: torch_save(tensors, directory / "torch.pt"))),
    }
    for turn in range(rounds + 1):
        with torch.no_grad():
            # Else files that have not changed would be linked instead of written.
            for value in tensors.values():
                value.add_(1e-6)
        for side in rotated(sides, turn):
            disk.path.unlink(missing_ok=True)
            side()
        for store in (ours, beside):
            for old in store.steps()[:-1]:
                shutil.rmtree(store.path / f"step-{old:09d}")
    disk.write()
    loads = measure_loads(task, rounds, directory, disk, (ours, beside))
    return {"seconds": seconds, "cpu": cpu, "loads": loads, "num_bytes": task.num_bytes}


def measure_loads(
    task: Task,
    rounds: int,
    directory: Path,
    disk: Disk,
    stores: tuple[Checkpointer, Checkpointer],
) -> Times:
    """Cold, into tensors that are there."""
    found: Times = {}
    wanted = {name: value.clone() for name, value in task.tensors().items()}
    tensors = task.tensors()
    turn = 0

    def cleared(path: Path) -> None:
        forget(path)
        with torch.no_grad():
            for value in tensors.values():
                value.zero_()

    def load_ours() -> None:
        cleared(stores[0].path)
        spent, _ = timed(lambda: stores[0].load(task.parts))
        check(wanted, task.tensors(), "ours")
        found.setdefault("ours", []).append(spent)

    def load_dcp() -> None:
        cleared(directory / "dcp")
        spent, _ = timed(lambda: dcp_load(tensors, checkpoint_id=directory / "dcp", no_dist=True))
        check(wanted, tensors, "dcp")
        found.setdefault("dcp", []).append(spent)

    def read_raw() -> None:
        found.setdefault("raw", []).append(timed(disk.read)[0])

    stores[1].load(task.parts)
    check(wanted, task.tensors(), "writer")
    for turn in range(rounds):
        for side in rotated({"ours": load_ours, "dcp": load_dcp, "raw": read_raw}, turn):
            side()
    for store in stores:
        store.close()
    return found


def measure_stalls(task: Task, rounds: int, directory: Path) -> dict[str, Any]:
    """What a save beside training costs training: the wait, and all time lost until it is durable."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'meeting'}", rank=0, world_size=1
    )
    ours = Checkpointer(directory / "ours", run="bench")
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    # Memory that is pinned needs a GPU; shared memory is what it would use without one.
    stager.state_dict_cache = _create_cpu_state_dict(task.tensors(), share_memory=True)
    stalls: Times = {}
    losses: Times = {}
    turn = 0

    def train_until(is_done: Callable[[], bool]) -> int:
        count = 0
        while count < 3 or not is_done():
            task.step()
            count += 1
        return count

    def plain() -> float:
        begun = time.perf_counter()
        for _ in range(3):
            task.step()
        return (time.perf_counter() - begun) / 3

    def note(side: str, stall: float, lost: float) -> None:
        if turn:
            stalls.setdefault(side, []).append(stall)
            losses.setdefault(side, []).append(lost)

    def save_ours() -> None:
        usual, begun = plain(), time.perf_counter()
        handle = ours.save(turn, task.parts, wait=False)
        called = time.perf_counter() - begun
        count = train_until(lambda: handle.is_done)
        lost = time.perf_counter() - begun - count * usual
        handle.wait()
        note("ours", called + handle.statistics()["gate_seconds"], lost)

    def save_dcp(side: str, **options: Any) -> None:
        usual, begun = plain(), time.perf_counter()
        done = async_save(task.tensors(), checkpoint_id=directory / side, **options)
        assert isinstance(done, Future)
        called = time.perf_counter() - begun
        count = train_until(done.done)
        lost = time.perf_counter() - begun - count * usual
        done.result()
        note(side, called, lost)

    sides = {
        "ours": save_ours,
        "dcp": lambda: save_dcp("dcp"),
        "reused": lambda: save_dcp("reused", async_stager=stager),
    }
    for turn in range(rounds + 1):
        for side in rotated(sides, turn):
            side()
        for old in ours.steps()[:-1]:
            shutil.rmtree(ours.path / f"step-{old:09d}")
    ours.close()
    with Checkpointer(directory / "ours") as again:
        if again.catalogue.verify(rounds).faults:
            raise SystemExit("ours: the last save is not whole")
    dist.destroy_process_group()
    return {"stalls": stalls, "losses": losses, "num_bytes": task.num_bytes}


def take_turns(task: Task, rounds: int, directory: Path) -> dict[str, Any]:
    """torch's asynchronous save as it is, whenever a line on the socket says so, with what it cost as the answer."""
    del rounds
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'meeting'}", rank=0, world_size=1
    )
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["BENCH_SOCKET"])
    lines = link.makefile("rb")
    link.sendall(json.dumps({"rank": 0, "pid": os.getpid()}).encode() + b"\n")
    while lines.readline():
        begun = time.perf_counter()
        for _ in range(3):
            task.step()
        usual, begun = (time.perf_counter() - begun) / 3, time.perf_counter()
        done = async_save(task.tensors(), checkpoint_id=directory / "dcp")
        assert isinstance(done, Future)
        stall, count = time.perf_counter() - begun, 0
        while count < 3 or not done.done():
            task.step()
            count += 1
        lost = time.perf_counter() - begun - count * usual
        done.result()
        answer = {"stall": stall, "lost": lost, "usual": usual}
        link.sendall(json.dumps(answer).encode() + b"\n")
    dist.destroy_process_group()
    return {}


def main() -> None:
    section, rounds, mebibytes, directory = sys.argv[1:5]
    torch.set_num_threads(1)
    task = Task(int(mebibytes))
    measure = {"saves": measure_saves, "stalls": measure_stalls, "turns": take_turns}[section]
    found = measure(task, int(rounds), Path(directory))
    for name, times in found.get("seconds", {}).items():
        print(name, statistics.median(times), file=sys.stderr)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
