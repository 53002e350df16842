"""One rank of the collectives benchmark: Gloo and argosy in the same processes, in turns; rank 0 prints one JSON line.

`python collective_ranks.py TASK QUICK`, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import argosy.move.groups  # noqa: F401 - registers the backend

KIB = 1024
SIZES = {
    "4KiB": 4 * KIB,
    "64KiB": 64 * KIB,
    "1MiB": KIB**2,
    "16MiB": 16 * KIB**2,
    "64MiB": 64 * KIB**2,
}

OPERATIONS = (
    "allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "gather", "scatter",
)  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    task, quick = sys.argv[1], sys.argv[2] == "1"
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "argosy")}
    found = {"sizes": sizes, "fallback": fallback, "ddp": ddp, "fsdp": fsdp}[task](groups, quick)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def operation(
    name: str, num_bytes: int, group: Any
) -> tuple[Callable[[], Any], Callable[[], bool]]:
    """A call of a collective on `num_bytes` of float32 (the full tensor's size), and a check of what it gave."""
    if name in ("reduce", "gather", "scatter"):
        return rooted(name, num_bytes, group)
    size, rank = dist.get_world_size(), dist.get_rank()
    count = num_bytes // 4 // size * size
    if name == "allreduce":
        # Zeros stay what they are however often they are added: no call starts from the result of another with larger numbers.
        tensor = torch.zeros(count)

        def check() -> bool:
            probe = torch.arange(count, dtype=torch.float32) % 1000 + rank
            dist.all_reduce(probe, group=group)
            wanted = (torch.arange(count, dtype=torch.float32) % 1000) * size + sum(range(size))
            return torch.equal(probe, wanted)

        return lambda: dist.all_reduce(tensor, group=group), check
    if name == "reduce_scatter":
        given, out = torch.ones(count), torch.empty(count // size)
        return (
            lambda: dist.reduce_scatter_single(out, given, group=group),
            lambda: bool((out == size).all()),
        )
    if name == "broadcast":
        tensor = torch.full((count,), float(rank + 1))
        return lambda: dist.broadcast(tensor, 0, group=group), lambda: bool((tensor == 1).all())
    out = torch.empty(count)
    if name == "all_to_all":
        given = torch.full((count,), float(rank))
        call = lambda: dist.all_to_all_single(out, given, group=group)  # noqa: E731
    else:
        given = torch.full((count // size,), float(rank))
        call = lambda: dist.all_gather_single(out, given, group=group)  # noqa: E731
    return call, lambda: all(bool((part == r).all()) for r, part in enumerate(out.chunk(size)))


def rooted(name: str, num_bytes: int, group: Any) -> tuple[Callable[[], Any], Callable[[], bool]]:
    """The same for reduce, gather and scatter, with rank 0 as the root."""
    size, rank = dist.get_world_size(), dist.get_rank()
    count, is_root = num_bytes // 4 // size * size, rank == 0
    if name == "reduce":
        # Zeros, as for the all-reduce.
        tensor = torch.zeros(count)

        def check() -> bool:
            probe = torch.full((count,), rank + 1.0)
            dist.reduce(probe, 0, group=group)
            return not is_root or bool((probe == sum(range(size + 1))).all())

        return lambda: dist.reduce(tensor, 0, group=group), check
    parts = [torch.full((count // size,), float(r)) for r in range(size)]
    one = torch.full((count // size,), float(rank))
    if name == "gather":
        into = [torch.empty_like(part) for part in parts]
        return (
            lambda: dist.gather(one, into if is_root else None, 0, group=group),
            lambda: not is_root or all(map(torch.equal, into, parts)),
        )
    out = torch.empty_like(one)
    return (
        lambda: dist.scatter(out, parts if is_root else None, 0, group=group),
        lambda: torch.equal(out, one),
    )


def compare(name: str, num_bytes: int, groups: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Medians of both sides, in turns, in microseconds per call; the slowest rank counts."""
    calls = 20 if num_bytes <= 64 * KIB else 5 if num_bytes <= KIB**2 else 1
    runs = {side: operation(name, num_bytes, group) for side, group in groups.items()}
    times: dict[str, list[float]] = {side: [] for side in groups}
    for side, (run, check) in runs.items():
        for _ in range(3):
            run()
        if not check():
            raise SystemExit(f"{side}: wrong result of {name} at {num_bytes} bytes")
    for index in range(rounds):
        for side in list(groups) if index % 2 else list(groups)[::-1]:
            dist.barrier(group=groups["argosy"])
            start = time.perf_counter()
            for _ in range(calls):
                runs[side][0]()
            times[side].append((time.perf_counter() - start) / calls * 1e6)
    slowest = {}
    for side, values in times.items():
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        slowest[side] = statistics.median(tensor.tolist())
    return {
        "gloo": slowest["gloo"],
        "argosy": slowest["argosy"],
        "speedup": slowest["gloo"] / slowest["argosy"],
    }


def sizes(groups: dict[str, Any], quick: bool) -> dict[str, Any]:
    found = {}
    for label, num_bytes in SIZES.items():
        rounds = (8 if quick else 30) if num_bytes < 16 * KIB**2 else (4 if quick else 12)
        found[f"allreduce_{label}"] = compare("allreduce", num_bytes, groups, rounds)
    for name in ("reduce_scatter", "all_gather"):
        found[f"{name}_16MiB"] = compare(name, SIZES["16MiB"], groups, 4 if quick else 12)
    return found


def fallback(groups: dict[str, Any], quick: bool) -> dict[str, Any]:
    found = {}
    for name in OPERATIONS:
        for label, num_bytes in SIZES.items():
            if quick and label == "64MiB":
                continue
            rounds = (6 if quick else 20) if num_bytes < 16 * KIB**2 else (3 if quick else 8)
            found[f"{name}_{label}"] = compare(name, num_bytes, groups, rounds)
    return found


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.mix, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.wide, self.narrow = (
            torch.nn.Linear(width, 4 * width),
            torch.nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.mix(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.second(x))))


class Gpt(torch.nn.Module):
    """About 10 million parameters."""

    def __init__(self, vocabulary: int = 2048, width: int = 320, depth: int = 7) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block(width, 5) for _ in range(depth))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def train(models: dict[str, Any], num_steps: int) -> tuple[dict[str, float], dict[str, bool]]:
    """Steps in turns; the medians of the slowest rank, and which sides ended with the bits of Gloo."""
    optimizers = {
        side: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for side, model in models.items()
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {side: [] for side in models}
    for index in range(num_steps):
        tokens = torch.randint(0, 2048, (1, 65), generator=generator)
        for side in list(models) if index % 2 else list(models)[::-1]:
            dist.barrier()
            times[side].append(step(models[side], optimizers[side], tokens))
    medians = {}
    for side, values in times.items():
        tensor = torch.tensor(values[2:], dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        medians[side] = statistics.median(tensor.tolist())
    return medians, {side: _agree(models["gloo"], model) for side, model in models.items()} | {
        "fast and argosy": _agree(models[next(reversed(models))], models["argosy"])
    }


def _agree(one: Any, other: Any) -> bool:
    """Whether all parameters of two models are equal bit by bit, on all ranks."""
    are_equal = all(
        torch.equal(_local(a), _local(b))
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
    flag = torch.tensor([int(are_equal)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


def ddp(groups: dict[str, Any], quick: bool) -> dict[str, Any]:
    models = {}
    for side, group in groups.items():
        torch.manual_seed(0)
        models[side] = torch.nn.parallel.DistributedDataParallel(Gpt(), process_group=group)
    medians, are_equal = train(models, 6 if quick else 20)
    return medians | {
        "speedup": medians["gloo"] / medians["argosy"],
        "equal": are_equal["argosy"],
    }


def fsdp(groups: dict[str, Any], quick: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from argosy.move.fsdp import fsdp_fast_path

    models = {}
    for side in ("gloo", "argosy", "fast"):
        mesh = DeviceMesh.from_group(groups["gloo" if side == "gloo" else "argosy"], "cpu")
        torch.manual_seed(0)
        model = Gpt()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if side == "fast":
            fsdp_fast_path(model)
        models[side] = model
    medians, are_equal = train(models, 8 if quick else 22)
    return medians | {
        "speedup": medians["gloo"] / medians["fast"],
        "plain_speedup": medians["gloo"] / medians["argosy"],
        "equal": are_equal["fast"],
        "fast_equal": are_equal["fast and argosy"],
    }


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
