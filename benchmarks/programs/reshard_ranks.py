"""Ranks of one case of the benchmark `reshard`: forked from one process that has imported torch; rank 0 prints a JSON line.

`python reshard_ranks.py CASE ROUNDS MEBIBYTES`: moves a state between two layouts, and in turn copies as many bytes with memcpy and
does the same by full_tensor() and a slice over Gloo. Every result is compared with the expected one before its time counts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from argosy.move import arenas, counters, reshard

WIDTH = 2048
TENSORS = 4

# size of the group, (mesh, placements) of the source, the same of the destination
CASES = {
    "shard0x2_to_shard1x2": (2, ([0, 1], [Shard(0)]), ([0, 1], [Shard(1)])),
    "2_to_3": (3, ([0, 1], [Shard(0)]), ([0, 1, 2], [Shard(0)])),
    "4_to_2": (4, ([0, 1, 2, 3], [Shard(0)]), ([0, 1], [Shard(0)])),
    "hsdp_to_tp": (4, ([[0, 1], [2, 3]], [Replicate(), Shard(0)]), ([0, 1, 2, 3], [Shard(1)])),
}


class Side:
    """One layout of the state on this rank: DTensors by name, nothing where the rank is outside the mesh."""

    def __init__(self, layout, shape, allocate):
        members, self.cuts = layout
        self.mesh = DeviceMesh("cpu", torch.tensor(members))
        self.ranks = torch.tensor(members).flatten().tolist()
        self.state = {}
        if self.mesh.get_coordinate() is not None:
            self.where = self.part(torch.empty(shape, device="meta"))
            for number in range(TENSORS):
                local = allocate(self.where.shape).zero_()
                self.state[f"layers.{number}"] = DTensor.from_local(
                    local, self.mesh, self.cuts, run_check=False, shape=shape, stride=(shape[1], 1)
                )

    def part(self, full):
        for axis, cut in enumerate(self.cuts):
            if isinstance(cut, Shard):
                pieces = full.chunk(self.mesh.size(axis), cut.dim)
                full = pieces[self.mesh.get_coordinate()[axis]]
        return full

    def locals(self):
        return {name: tensor.to_local() for name, tensor in self.state.items()}


def expected(number, shape):
    return torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) + number


def work(rank, case, rounds, mebibytes):
    _, old, new = CASES[case]
    shape = (mebibytes * (1 << 20) // 4 // WIDTH // TENSORS, WIDTH)
    arena = arenas.create("bench-reshard", mebibytes * (1 << 20) + (1 << 20))
    source = Side(old, shape, arena.empty)
    destination = Side(new, shape, torch.empty)
    for number, local in enumerate(source.locals().values()):
        local.copy_(source.part(expected(number, shape)))
    wanted = {
        name: destination.part(expected(number, shape)).clone()
        for number, name in enumerate(destination.state)
    }
    written = sum(local.numel() for local in destination.locals().values())
    memcpy_from, memcpy_into = torch.ones(written), torch.zeros(written)
    found = {"extra": extra_memory(source, destination)}

    def check(side):
        is_right = all(torch.equal(local, wanted[n]) for n, local in destination.locals().items())
        if not is_right:
            raise SystemExit(f"{side} gave a wrong result on rank {rank}")
        for local in destination.locals().values():
            local.zero_()

    with reshard.prepare(source.state, destination.state) as prepared:
        sides = {
            "ours": prepared.run,
            "memcpy": lambda: memcpy_into.copy_(memcpy_from),
            "once": lambda: reshard.reshard(source.state, destination.state),
            "gloo": lambda: by_full_tensor(source, destination, rank, shape),
        }
        for name in ("ours", "once", "gloo"):
            sides[name]()  # connections and pages are warm before the clock starts
            check(name)
        moved = prepared.statistics()["moved_bytes"]
        times = {name: [] for name in sides}
        for number in range(rounds):
            for name, side in sides.items():
                if name == "gloo" and number % 3:
                    continue
                dist.barrier()
                began = time.perf_counter()
                side()
                took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                times[name].append(took.item())
                if name != "memcpy":
                    check(name)
        total = torch.tensor(moved, dtype=torch.int64)
        dist.all_reduce(total)
        found |= {
            "bytes_over_lower_bound": total.item() / prepared.plan.lower_bound,
            "planned_over_lower_bound": prepared.plan.bytes / prepared.plan.lower_bound,
            "seconds": {name: statistics.median(values) for name, values in times.items()},
            "over_memcpy": statistics.median(
                ours / memcpy for ours, memcpy in zip(times["ours"], times["memcpy"], strict=True)
            ),
            "times": times,
        }
    extra = torch.tensor(found["extra"], dtype=torch.float64)
    dist.all_reduce(extra)
    found["extra_mib"] = extra.item() / (1 << 20)
    return found


def by_full_tensor(source, destination, rank, shape):
    """What an ordinary script does: gather the whole tensor, give it to who has none, take a slice."""
    outside = sorted(set(destination.ranks) - set(source.ranks))
    for name in [f"layers.{number}" for number in range(TENSORS)]:
        full = source.state[name].full_tensor() if name in source.state else torch.empty(shape)
        if outside:
            dist.broadcast(full, 0)
        if name in destination.state:
            destination.state[name].to_local().copy_(destination.part(full))


def extra_memory(source, destination):
    """Bytes of private memory that this rank needs at most beyond what it has before, while it reshards once."""
    before = anonymous_bytes()
    staged = counters.own.copy_bytes
    most, is_over = [before], threading.Event()

    def watch():
        while not is_over.wait(0.001):
            most.append(anonymous_bytes())

    for local in destination.locals().values():
        local.zero_()  # its pages exist before
    before = anonymous_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    reshard.reshard(source.state, destination.state)
    most.append(anonymous_bytes())
    is_over.set()
    watcher.join()
    return max(0, max(most) - before) + counters.own.copy_bytes - staged


def anonymous_bytes():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    case, rounds, mebibytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    size = CASES[case][0]
    with tempfile.NamedTemporaryFile(prefix="argosy-bench-store-") as store:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    torch.set_num_threads(1)
                    dist.init_process_group(
                        "gloo", store=dist.FileStore(store.name, size), rank=rank, world_size=size
                    )
                    found = work(rank, case, rounds, mebibytes)
                    if rank == 0:
                        print(json.dumps(found), flush=True)
                    code = 0
                except BaseException:  # noqa: BLE001
                    traceback.print_exc()
                finally:
                    os._exit(code)
            pids.append(pid)
        return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
