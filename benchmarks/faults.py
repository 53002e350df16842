"""Fault trials: a training run of four ranks, one fault at a random instant, and what became of it.

A trial is good when the run finishes, its digest is that of a run that nobody disturbed, no committed step was done again and each step's loss on record has
the bits of the undisturbed run: the same samples, each once. Faults from outside are signals to real processes; faults of the program
itself are in programs/train_recorded.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import SideFailed, wait_until
from benchmarks.ours import Cluster, is_alive
from benchmarks.recorded import Recorded, losses_by_step

GANG = 4
STEPS = 60
END_SECONDS = 90.0
INSIDE = ("exception", "deadlock", "gil", "slow", "memory", "nan")
OUTSIDE = (
    "rank",
    "two_ranks",
    "all_ranks",
    "stop",
    "zygote",
    "keeper",
    "agent",
    "controller",
    "agent_and_controller",
    "preemption",
)


KINDS = INSIDE + OUTSIDE


class Trial(NamedTuple):
    kind: str
    is_finished: bool
    is_hash_equal: bool
    steps_lost: int
    samples_wrong: int
    seconds: float
    why: str


class Reference(NamedTuple):
    """A run that nobody disturbed."""

    digest: str
    losses: dict[int, set[str]]


def one_trial(
    cluster: Cluster,
    out: Path,
    chance: random.Random,
    kind: str,
    reference: Reference,
    task: dict[str, str],
) -> Trial:
    """Start a run, do one thing to it, wait for its end, and compare."""
    began = time.monotonic()
    environment = task | {"BENCH_STEPS": str(STEPS), "BENCH_PACE": "0.01"}
    if kind in INSIDE:
        environment |= {
            "BENCH_FAULT": kind,
            "BENCH_FAULT_STEP": str(chance.randrange(1, STEPS - 1)),
            "BENCH_FAULT_LANE": str(chance.randrange(8)),
        }
    cluster.up()  # a cluster that the last trial has shot dead comes back
    recorded = Recorded(cluster, out, GANG, **environment)
    why = ""
    try:
        if kind in OUTSIDE:
            recorded.wait_step(chance.randrange(0, STEPS * 3 // 4))
            time.sleep(chance.random() * 0.05)
            if recorded.newest_step() >= STEPS - 2:
                raise SideFailed("the fault came too late")
            OUTSIDE_FAULTS[kind](cluster, recorded, chance)
        outcome = recorded.wait_end(timeout_seconds=END_SECONDS)
        if outcome != "succeeded":
            why = f"outcome {outcome}"
    except (SideFailed, OSError) as failure:
        why = f"{str(failure)[-300:]}; {story(cluster, recorded)}"
    finally:
        with contextlib.suppress(SideFailed, OSError):
            recorded.stop()
    digest = ""
    with contextlib.suppress(SideFailed):
        digest = recorded.digest()
    lost, wrong, unrecorded = count_damage(recorded, reference)
    if digest != reference.digest:
        wrong += unrecorded
    if not why and INSIDE.count(kind) and not (out / "fault").exists():
        why = "the fault did not happen"
    return Trial(
        kind,
        not why,
        digest == reference.digest,
        lost,
        wrong,
        time.monotonic() - began,
        why,
    )


def story(cluster: Cluster, recorded: Recorded) -> str:
    """What the runtime says about a run that did not end as it should."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return cluster.command("why", recorded.run, check=False, timeout_seconds=20.0)[-600:]
    return ""


def count_damage(recorded: Recorded, reference: Reference) -> tuple[int, int, int]:
    """(committed steps that were done again, steps with other samples than they should have, steps of which there is no record).

    Of the last kind are steps after whose commit all ranks died before one of them had written its line. That nothing was left out in them is said by the digest of the end, and by nothing else.
    """
    again = 0
    for path in recorded.out.glob("*.steps"):
        steps = [c.step for c in sorted(recorded.commits(int(path.stem)), key=lambda c: c.time_ns)]
        again += sum(b <= a for a, b in itertools.pairwise(steps))
    committed: dict[int, int] = {}
    for commit in sorted(recorded.all_commits(), key=lambda c: c.time_ns):
        committed.setdefault(commit.step, commit.time_ns)
    # A step first committed after a later one: the run went back.
    order = sorted(committed, key=lambda step: committed[step])
    again += sum(b < a for a, b in itertools.pairwise(order))
    seen = losses_by_step(recorded.all_commits())
    wrong = sum(seen.get(step, losses) != losses for step, losses in reference.losses.items())
    return again, wrong, len(reference.losses.keys() - seen.keys())


def kill_ranks(recorded: Recorded, chance: random.Random, count: int) -> None:
    pids = recorded.pids()
    for rank in chance.sample(sorted(pids), min(count, len(pids))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGKILL)


def stop_rank(recorded: Recorded, chance: random.Random) -> None:
    pids = recorded.pids()
    victim = pids[chance.choice(sorted(pids))]
    os.kill(victim, signal.SIGSTOP)
    try:
        wait_until("a stopped rank to be ended", lambda: not is_alive(victim), timeout_seconds=60.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)


def kill_runtime(cluster: Cluster, *names: str) -> None:
    pids = cluster.pids()
    for name in names:
        os.kill(pids[name], signal.SIGKILL)


def kill_zygotes(cluster: Cluster) -> None:
    """Warm parents are children of the keeper whose command line says so."""
    keeper = cluster.pids()["keeper"]
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    for pid in map(int, children):
        with contextlib.suppress(OSError):
            if b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def preempt(cluster: Cluster, recorded: Recorded) -> None:
    """SIGTERM to all ranks, as a scheduler of machines sends it: they save and leave, and the run goes on with new ones."""
    for pid in recorded.pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


OUTSIDE_FAULTS: dict[str, Any] = {
    "rank": lambda cluster, recorded, chance: kill_ranks(recorded, chance, 1),
    "two_ranks": lambda cluster, recorded, chance: kill_ranks(recorded, chance, 2),
    "all_ranks": lambda cluster, recorded, chance: kill_ranks(recorded, chance, GANG),
    "stop": lambda cluster, recorded, chance: stop_rank(recorded, chance),
    "zygote": lambda cluster, recorded, chance: kill_zygotes(cluster),
    "keeper": lambda cluster, recorded, chance: kill_runtime(cluster, "keeper"),
    "agent": lambda cluster, recorded, chance: kill_runtime(cluster, "agent"),
    "controller": lambda cluster, recorded, chance: kill_runtime(cluster, "controller"),
    "agent_and_controller": lambda cluster, recorded, chance: kill_runtime(
        cluster, "agent", "controller"
    ),
    "preemption": lambda cluster, recorded, chance: preempt(cluster, recorded),
}
