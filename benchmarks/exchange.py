"""`exchange`: the gradient exchange of a step against the memory it must read, and what kills at random points do to it.

10 M parameters of a small GPT, 8 lanes in 4 pair blocks. The bytes that must be read are those of the blocks; the bandwidth is that of the fastest of
three plain reads of the same bytes by the same processes, interleaved with the exchange in one run. A round is everything from the
claims to the last vote; writing the sums is in its time, not in its bytes. Each takes from when the first rank begins to when the last one is
done: with more ranks than cores some have read all of theirs before another one even runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from argosy.move import arenas
from argosy.move import exchange as exchanges
from argosy.move.gathered import total
from argosy.move.layout import Layout, Parameter
from argosy.move.rounds import Round
from benchmarks import kills
from benchmarks.measure import SideFailed, median, ratio, rounded, say, spread

LANES = 8
WAIT_SECONDS = 60.0
READ_PART = 255
"""Rounds of this part move nothing: their end is a barrier."""

Spans = dict[str, list[tuple[float, float]]]
"""What was done -> when it began and ended, each time."""

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": torch.sum,
    "dot": lambda x: torch.dot(x, x),
    "norm": torch.linalg.vector_norm,
}


def run(*, quick: bool) -> dict[str, Any]:
    """Measure everything and return the metrics."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for ranks in (2, 4):
        say(f"exchange, {ranks} ranks")
        found |= measure(ranks, rounds=20 if quick else 100)
    say("kills at random points")
    try:
        found |= kills.measure(quick=quick)
    except (SideFailed, subprocess.TimeoutExpired) as failure:
        say(f"kills failed: {failure}")
        found |= dict.fromkeys(kills.TOTALS) | {"notes": {"kills": str(failure)[-500:]}}
    return found


def small_gpt() -> tuple[Parameter, ...]:
    """About 10 M parameters: 6 blocks of width 320 and a tied embedding of 8192 tokens."""
    width, blocks = 320, 6
    sizes = {"embedding": 8192 * width, "positions": 256 * width}
    for block in range(blocks):
        sizes |= {
            f"{block}.attention.in": 3 * width * width,
            f"{block}.attention.out": width * width,
            f"{block}.mlp.in": 4 * width * width,
            f"{block}.mlp.out": 4 * width * width,
            f"{block}.norm1": width,
            f"{block}.norm2": width,
        }
    return tuple(Parameter(name=name, numel=numel) for name, numel in sizes.items())


def measure(ranks: int, *, rounds: int) -> dict[str, Any]:
    """Rounds of `ranks` processes: seconds of exchange and of plain reads, from the first rank's beginning to the last one's end."""
    layout = Layout(num_lanes=LANES, most_ranks=ranks, parameters=small_gpt())
    name = f"bench-exchange-{ranks}"
    exchange = exchanges.open(name, layout)
    pages = [split_pages(layout, rank, ranks) for rank in range(ranks)]
    try:
        for slot in range(layout.slots):
            exchange.slot(slot).copy_(torch.randn(layout.num_elements))
        times = whole(
            forked(lambda rank, pids: rank_times(exchange, rank, pids, pages[rank], rounds), ranks)
        )
    finally:
        exchange.close()
        arenas.release(name)
    blocks = LANES // 2
    read_bytes = 4 * sum(parameter.numel for parameter in layout.parameters) * blocks
    suffix = "" if ranks == 2 else f"_{ranks}ranks"
    best = min((median(times[read]) or 0.0, read) for read in READS)
    taken = median(times["exchange"])
    return {
        f"exchange_over_read_bandwidth{suffix}": rounded(ratio(best[0], taken), 3),
        f"exchange_ms{suffix}": rounded(1000 * (taken or 0.0), 2),
        f"exchange_ms_spread{suffix}": spread([1000 * t for t in times["exchange"]]),
        f"read_gb_per_second{suffix}": rounded(read_bytes / best[0] / 1e9, 2),
        f"read_by{suffix}": best[1],
    }


def split_pages(layout: Layout, rank: int, ranks: int) -> list[int]:
    """Equal shares of pages: whole parameters would measure the balance of this model, not the exchange."""
    return list(range(layout.num_pages * rank // ranks, layout.num_pages * (rank + 1) // ranks))


def rank_times(
    exchange: exchanges.Exchange, rank: int, pids: list[int], pages: list[int], rounds: int
) -> Spans:
    layout = exchange.layout
    members = {r: -1 if r == rank else os.pidfd_open(pid) for r, pid in enumerate(pids)}
    exchange.enter(1, rank, members, deadline=time.monotonic() + WAIT_SECONDS)
    ranks = len(pids)
    first, stop = (layout.num_lanes * (rank + i) // ranks for i in (0, 1))
    blocks = layout.blocks(first, stop - first)
    out = torch.zeros(layout.num_elements)
    start, end = layout.bounds(pages[0])[0], layout.bounds(pages[-1])[1]
    times: Spans = {name: [] for name in (*READS, "exchange")}
    for number in range(rounds + 2):
        # The slots that hold the blocks of the last round: what the exchange reads.
        held = (
            [
                exchange.slot(block.slot)[start:end]
                for block in exchange.published(Round(0, number - 1))
            ]
            if number
            else []
        )
        for name, read in READS.items():
            began = barrier(exchange, 4 * number + list(READS).index(name))
            for flat in held:
                read(flat)
            times[name].append((began, time.perf_counter()))
        began = barrier(exchange, 4 * number + 3)
        one_round(exchange, Round(0, number), blocks, pages, out)
        times["exchange"].append((began, time.perf_counter()))
    check_sums(exchange, Round(0, rounds + 1), pages, out)
    return {name: values[2:] for name, values in times.items()}


def whole(spans: list[Spans]) -> dict[str, list[float]]:
    """Seconds of each thing that the ranks did together; their clock is the machine's."""
    return {
        name: [
            max(end for _, end in together) - min(began for began, _ in together)
            for together in zip(*(rank[name] for rank in spans), strict=True)
        ]
        for name in spans[0]
    }


def check_sums(
    exchange: exchanges.Exchange, round: Round, pages: list[int], out: torch.Tensor
) -> None:
    """The last round's sums are those of its four blocks, added in the order of the tree."""
    a, b, c, d = (exchange.slot(block.slot) for block in exchange.published(round))
    for start, stop in map(exchange.layout.bounds, pages):
        own = slice(start, stop)
        if not torch.equal(out[own], (a[own] + b[own]) + (c[own] + d[own])):
            raise SideFailed(f"the sum of elements {start} to {stop} is wrong")


def barrier(exchange: exchanges.Exchange, number: int, half: int = 0) -> float:
    """Wait for all ranks; when that was."""
    nothing = Round(0, 2 * number + half, READ_PART)
    exchange.wait_read(nothing, deadline=time.monotonic() + WAIT_SECONDS)
    return time.perf_counter()


def one_round(
    exchange: exchanges.Exchange,
    round: Round,
    blocks: list[Any],
    pages: list[int],
    out: torch.Tensor,
) -> float:
    """From the claims to the global norm; the gradients are in the slots already."""
    deadline = time.monotonic() + WAIT_SECONDS
    for block in blocks:
        claim = exchange.claim(round, block)
        assert claim is not None
        exchange.publish(claim, terms={"loss": (1.0, 1.0)})
    gathered = exchange.wait_lanes(round, deadline=deadline)
    exchange.vote(round, pages, exchange.reduce(gathered, pages, out))
    return total(exchange.wait_votes(round, deadline=deadline))


def forked(work: Callable[[int, list[int]], Spans], ranks: int) -> list[Spans]:
    """Run `work` in forks; what each found. Every fork learns the pids of all before it begins."""
    pids: list[int] = []
    inputs, results = [os.pipe() for _ in range(ranks)], [os.pipe() for _ in range(ranks)]
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(300)
                for other in range(ranks):
                    os.close(inputs[other][1])
                    if other != rank:
                        os.close(results[other][1])
                told = json.loads(os.read(inputs[rank][0], 4096))
                found = work(rank, told)
                with os.fdopen(results[rank][1], "w") as pipe:
                    json.dump(found, pipe)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    for (reader, writer), (_, result) in zip(inputs, results, strict=True):
        os.write(writer, json.dumps(pids).encode())
        for descriptor in (reader, writer, result):
            os.close(descriptor)
    texts = []
    for reader, _ in results:
        with os.fdopen(reader) as pipe:
            texts.append(pipe.read())
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise SideFailed(f"ranks ended with {codes}")
    return [json.loads(text) for text in texts]
