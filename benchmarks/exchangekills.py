"""Kills at random points of exchanges: is every survivor told in time, is any torn version ever seen, is anything left behind?

Ranks of exchangeranks.py run without an end; the parent kills one, reaps it, puts a replacement in its place and compares every version it pins with the
digests of a run that nobody disturbed.
"""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.exchangeranks import Gang, Job, reference
from benchmarks.measure import percentile, rounded

RANKS = 3
LANES = 8


def measure(trials: int, *, seed: int) -> dict[str, Any]:
    """The metrics `exchange_peer_kill_trials`, `exchange_typed_errors_within_1s`, `exchange_torn_versions_seen`, `exchange_leaks`."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    before = _held()
    counts = {"typed": 0, "torn": 0, "checked": 0}
    told_ms: list[float] = []
    digests = reference(LANES, 64)
    done = 0
    while done < trials:
        # Digests are known for so many versions; then a fresh exchange begins again at version 0.
        done += one_exchange(chance, trials - done, digests, counts, told_ms)
    return {
        "exchange_peer_kill_trials": trials,
        "exchange_typed_errors_within_1s": counts["typed"],
        "exchange_torn_versions_seen": counts["torn"],
        "exchange_versions_checked": counts["checked"],
        "exchange_leaks": len(_held() - before),
        "exchange_told_p99_ms": rounded(percentile(told_ms, 0.99), 1),
    }


def _held() -> set[str]:
    """The descriptors and children of this process, without garbage that waits for its collection."""
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {f"descriptor {each}" for each in os.listdir("/proc/self/fd")} | {
        f"child {each}" for each in children
    }


def one_exchange(
    chance: random.Random,
    trials: int,
    digests: list[str],
    counts: dict[str, int],
    told_ms: list[float],
) -> int:
    """Kills until the digests run out; how many."""
    job = Job(f"kills-{chance.randrange(1 << 40)}", lanes=LANES, ranks=RANKS)
    gang = Gang(job, RANKS)
    job.exchange.observe(0)
    number = 0
    try:
        while number < trials and job.exchange.state.current()[0] + 20 < len(digests):
            gang.wait_version(job.exchange.state.current()[0] + 1)
            time.sleep(chance.random() * 0.02)
            victim = chance.randrange(RANKS)
            survivors, generation = [r for r in gang.pids if r != victim], gang.generation
            sent = gang.kill(victim, replace=True)
            told = gang.wait_told(survivors, generation, 1.0)
            is_typed = len(told) == len(survivors) and max(told.values()) - sent < 1.0
            counts["typed"] += is_typed
            told_ms += [1000 * (at - sent) for at in told.values()]
            check_version(job, digests, counts)
            gang.announce()
            number += 1
        gang.finish()
        check_version(job, digests, counts)
    finally:
        gang.close()
        job.close()
    return number


def check_version(job: Job, digests: list[str], counts: dict[str, int]) -> None:
    """Pin what is committed and compare it with what it must be."""
    version, slot = job.exchange.state.pin()
    counts["checked"] += 1
    counts["torn"] += job.digest(slot) != digests[version]
    job.exchange.state.unpin(version)
