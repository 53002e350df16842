"""Sides of the benchmark `checkpoint` in one process: ours, torch's distributed checkpoint, torch.save, and the bare disk; prints a JSON line.

`python checkpoint_sides.py SECTION ROUNDS MEBIBYTES DIRECTORY`: within a round the sides take turns, in another order each time, on one AdamW state.
What a side saved is loaded and compared before its times count. `dcp_turns` and `our_turns` are one side alone, for turns with another process (checkpoint_task.py).
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
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

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint_task import Saving, Task, one_turn, take_turns

BLOCK = 8 << 20
THREADS = 4
Times = dict[str, list[float]]


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
            keep_newest(store)
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
    meet(directory)
    ours = Checkpointer(directory / "ours", run="bench")
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    # Memory that is pinned needs a GPU; shared memory is what it would use without one.
    stager.state_dict_cache = _create_cpu_state_dict(task.tensors(), share_memory=True)
    stalls: Times = {}
    losses: Times = {}
    turn = 0

    def measure(side: str, save: Callable[[], Saving]) -> None:
        found = one_turn(task.step, save)
        if turn:
            stalls.setdefault(side, []).append(found["stall"])
            losses.setdefault(side, []).append(found["lost"])

    sides = {
        "ours": lambda: measure("ours", lambda: save_ours(task, ours, turn)),
        "dcp": lambda: measure("dcp", lambda: save_dcp(task, directory / "dcp")),
        "reused": lambda: measure(
            "reused", lambda: save_dcp(task, directory / "reused", async_stager=stager)
        ),
    }
    for turn in range(rounds + 1):
        for side in rotated(sides, turn):
            side()
        keep_newest(ours)
    ours.close()
    with Checkpointer(directory / "ours") as again:
        if again.catalogue.verify(rounds).faults:
            raise SystemExit("ours: the last save is not whole")
    dist.destroy_process_group()
    return {"stalls": stalls, "losses": losses, "num_bytes": task.num_bytes}


def save_ours(task: Task, store: Checkpointer, step: int) -> Saving:
    handle = store.save(step, task.parts, wait=False)

    def finish() -> float:
        handle.wait()
        return float(handle.statistics()["gate_seconds"])

    return Saving(lambda: handle.is_done, finish)


def save_dcp(task: Task, path: Path, **options: Any) -> Saving:
    done = async_save(task.tensors(), checkpoint_id=path, **options)
    assert isinstance(done, Future)

    def finish() -> float:
        done.result()
        return 0.0

    return Saving(done.done, finish)


def keep_newest(store: Checkpointer) -> None:
    for old in store.steps()[:-1]:
        shutil.rmtree(store.path / f"step-{old:09d}")


def meet(directory: Path) -> None:
    """The process group that torch's asynchronous save wants."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'meeting'}", rank=0, world_size=1
    )


def take_dcp_turns(task: Task, rounds: int, directory: Path) -> dict[str, Any]:
    """torch's asynchronous save as it is."""
    del rounds
    meet(directory)
    take_turns(task, lambda: save_dcp(task, directory / "dcp"))
    dist.destroy_process_group()
    return {}


def take_our_turns(task: Task, rounds: int, directory: Path) -> dict[str, Any]:
    """Ours."""
    del rounds
    step = 0
    with Checkpointer(directory / "ours", run="bench") as ours:

        def save() -> Saving:
            nonlocal step
            step += 1
            saving = save_ours(task, ours, step)

            def finish() -> float:
                waited = saving.finish()
                keep_newest(ours)
                return waited

            return Saving(saving.is_done, finish)

        take_turns(task, save, lambda: ours.load(task.parts))
    return {}


def main() -> None:
    section, rounds, mebibytes, directory = sys.argv[1:5]
    torch.set_num_threads(1)
    task = Task(int(mebibytes))
    measure = {
        "saves": measure_saves,
        "stalls": measure_stalls,
        "dcp_turns": take_dcp_turns,
        "our_turns": take_our_turns,
    }[section]
    found = measure(task, int(rounds), Path(directory))
    for name, times in found.get("seconds", {}).items():
        print(name, statistics.median(times), file=sys.stderr)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
