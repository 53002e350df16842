"""`train`: how fast the trainer is beside hand-written loops, DDP, FSDP2 and two trainers, what exactness costs, and what it needs in memory.

All sides of a comparison live at the same time and take turns, one at a time (teams.py, pairs.py); their first losses must agree before anything is
timed. A section that fails gives null for its metrics and says why; the others still run.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import dataseek, generation
from benchmarks.measure import (
    PROGRAMS,
    SideFailed,
    median,
    rounded,
    say,
    scratch,
    settle,
    spread,
    wait_until,
)
from benchmarks.ours import Cluster
from benchmarks.pairs import against_itself, interleave, speed
from benchmarks.teams import (
    Team,
    closing,
    peer_versions,
    start_ours,
    start_peer,
    start_torch,
)
from benchmarks.tokenfile import write_tokens

CHECKED_STEPS = 5
# Sums in another order: a difference of this size grows from the last bits within the first steps.
TOLERANCE = 2e-4
XS_STEPS = 5
GANG = 4
SHORT_ROW = "16"
"""Tokens."""

Section = Callable[["Plan"], dict[str, Any]]


class Plan:
    """How much to measure, and where."""

    def __init__(self, directory: Path, *, quick: bool, pairs: int | None) -> None:
        self.directory = directory
        self.is_quick = quick
        self.pairs = pairs or (6 if quick else 200)
        self.few_pairs = min(self.pairs, 6 if quick else 60)
        self.launches = 3 if quick else 15
        self.tokens = str(write_tokens(directory))

    def task(self, size: str, **more: str) -> dict[str, str]:
        return {"BENCH_SIZE": size, "BENCH_TOKENS": self.tokens, **more}


def run(
    *, quick: bool, trials: int | None = None, only: str = "", seed: int | None = None
) -> dict[str, Any]:
    """Measure everything, or the sections named in `only`; `trials` is the number of pairs."""
    metrics: dict[str, Any] = {}
    notes: dict[str, str] = {}
    with scratch() as directory:
        plan = Plan(directory, quick=quick, pairs=trials)
        for name, section in SECTIONS.items():
            if only and name not in only.split(","):
                continue
            settle()
            say(f"train: {name}")
            try:
                metrics |= section(plan)
            except (SideFailed, subprocess.TimeoutExpired) as failure:
                say(f"train: {name} failed: {failure}")
                notes[name] = str(failure)[-600:]
                metrics |= dict.fromkeys(GIVES[name])
    metrics["versions"] = peer_versions(
        "trainers", ("torch", "lightning", "transformers", "accelerate")
    )
    if notes:
        metrics["notes"] = notes
    return metrics


def one_rank_xs(plan: Plan) -> dict[str, Any]:
    """One process on the same rows as everywhere."""
    times = compare_trainers(plan, plan.task("XS"), "one rank, XS")
    return (
        compared("one_rank_over_raw_loop_xs", times, "raw")
        | compared("one_rank_over_lightning", times, "lightning")
        | compared("one_rank_over_hf_trainer", times, "huggingface")
    )


def short_rows(plan: Plan) -> dict[str, Any]:
    """The same with little to compute, where the cost of a call counts most."""
    times = compare_trainers(plan, plan.task("XS", BENCH_ROW=SHORT_ROW), "one rank, short rows")
    return (
        compared("short_rows_over_raw_loop", times, "raw")
        | compared("short_rows_over_lightning", times, "lightning")
        | compared("short_rows_over_hf_trainer", times, "huggingface")
    )


def compare_trainers(plan: Plan, task: dict[str, str], label: str) -> dict[str, list[float]]:
    """One process of ours, of a hand-written loop, and of each of the other trainers."""
    ours, raw = start_ours(plan.directory, 1, **task), start_torch("raw", plan.directory, 1, **task)
    peers = [start_peer(name, plan.directory, **task) for name in ("lightning", "huggingface")]
    return compare([ours, raw, *peers], plan.pairs, steps=XS_STEPS, label=label)


def one_rank_s(plan: Plan) -> dict[str, Any]:
    task = plan.task("S")
    teams = [
        start_ours(plan.directory, 1, **task),
        start_torch("raw", plan.directory, 1, **task),
    ]
    times = compare(teams, plan.pairs, label="one rank, S")
    return compared("one_rank_over_raw_loop_s", times, "raw")


def ddp(plan: Plan, ranks: int) -> dict[str, Any]:
    task = plan.task("S")
    teams = [
        start_ours(plan.directory, ranks, **task),
        start_torch("ddp", plan.directory, ranks, **task),
    ]
    memory: dict[str, int] = {}
    times = compare(teams, plan.pairs, label=f"{ranks} ranks and DDP, S", memory=memory)
    found = compared(f"tokens_per_second_over_ddp_gloo_{ranks}ranks", times, "ddp")
    if ranks == GANG:
        found["memory_over_ddp"] = rounded(memory["ours"] / memory["ddp"])
        found["memory_mib"] = {name: size >> 20 for name, size in memory.items()}
    return found


def fsdp2(plan: Plan, ranks: int) -> dict[str, Any]:
    task = plan.task("S")
    teams = [start_ours(plan.directory, ranks, **task)] + [
        start_torch(form, plan.directory, ranks, **task) for form in ("fsdp2", "fsdp2_kept")
    ]
    times = compare(teams, plan.few_pairs, label=f"{ranks} ranks and FSDP2, S")
    name = f"tokens_per_second_over_fsdp2_gloo_{ranks}ranks"
    return compared(name, times, "fsdp2") | compared(f"{name}_kept", times, "fsdp2_kept")


def exact(plan: Plan) -> dict[str, Any]:
    """Both modes of ours, two ranks."""
    exactly = start_ours(plan.directory, 2, **plan.task("S"))
    fast = start_ours(plan.directory, 2, **plan.task("S", BENCH_MODE="fast"))
    fast.name = "fast"
    times = compare([exactly, fast], plan.pairs, label="exact and fast, S")
    return compared("exact_over_fast", times, "fast")


def tolerance(plan: Plan) -> dict[str, Any]:
    """With and without what a death would need, two ranks: the same trainer with recovery=False, which updates in place."""
    with_it = start_ours(plan.directory, 2, **plan.task("S"))
    without = start_ours(plan.directory, 2, **plan.task("S", BENCH_RECOVERY="off"))
    without.name = "off"
    times = compare([with_it, without], plan.pairs, label="fault tolerance on and off, S")
    return compared("fault_tolerance_on_over_off", times, "off")


def warm_rerun(plan: Plan) -> dict[str, Any]:
    """A script is edited, `argosy run -n 4` it: until the last rank has done its first step."""
    seconds = []
    with scratch() as directory, Cluster(directory) as cluster:
        cluster.environment |= plan.task("XS")
        cluster.up()
        for number in range(plan.launches + 2):
            settle(timeout_seconds=3.0)
            seconds.append(edit_and_run(cluster, number))
            say(f"edited and run again: {seconds[-1]:.3f} s")
    counted = seconds[2:]
    return {
        "warm_rerun_seconds": rounded(median(counted), 3),
        "warm_rerun_seconds_spread": spread(counted),
    }


def edit_and_run(cluster: Cluster, number: int) -> float:
    program = cluster.directory / "train_first_step.py"
    (cluster.directory / "train_task.py").write_text((PROGRAMS / "train_task.py").read_text())
    text = (PROGRAMS / "train_first_step.py").read_text()
    program.write_text(text.replace("EDITED = 0", f"EDITED = {number + 1}"))
    with scratch() as out:
        began = time.time_ns()
        client = cluster.start("run", "-n", str(GANG), str(program), out=out)
        files = [out / f"rank{rank}" for rank in range(GANG)]
        try:
            wait_until(
                "four first steps", lambda: all(file.exists() for file in files), every=0.002
            )
        except SideFailed as failure:
            raise SideFailed(f"{failure}; {cluster.log_tail()}")
        words = [file.read_text().split() for file in files]
        if {word[1] for word in words} != {str(number + 1)}:
            raise SideFailed(f"an old script ran: {words}")
        cluster.finish(client)
        return (max(int(word[0]) for word in words) - began) / 1e9


def compare(
    teams: list[Team],
    rounds: int,
    *,
    label: str,
    steps: int = 1,
    memory: dict[str, int] | None = None,
) -> dict[str, list[float]]:
    """Check that all teams compute the same, then let them take turns."""
    with closing(*teams):
        losses = {team.name: team.turn(CHECKED_STEPS).losses for team in teams}
        check_losses(losses)
        times = interleave(
            {team.name: lambda team=team: team.turn(steps).seconds for team in teams},
            rounds,
            label=label,
        )
        if memory is not None:
            memory |= {team.name: team.memory_bytes() for team in teams}
    return times


def check_losses(losses: dict[str, list[float]]) -> None:
    """All sides have the same losses in their first steps, and they fall."""
    first = losses["ours"]
    for name, theirs in losses.items():
        if any(abs(a - b) > TOLERANCE * abs(a) for a, b in zip(first, theirs, strict=True)):
            raise SideFailed(f"the losses of {name} are {theirs}, ours {first}")
    if first[-1] >= first[0]:
        raise SideFailed(f"the loss does not fall: {first}")


def compared(metric: str, times: dict[str, list[float]], other: str) -> dict[str, Any]:
    found = speed(times["ours"], times[other])
    say(f"{metric}: {found['ratio']} {found['interval']}")
    return {
        metric: found["ratio"],
        f"{metric}_interval": found["interval"],
        f"{metric}_pairs": found["pairs"],
        f"{metric}_against_itself": against_itself(times["ours"])["interval"],
        f"{metric}_seconds": [rounded(median(times["ours"])), rounded(median(times[other]))],
    }


def data(plan: Plan) -> dict[str, Any]:
    """Seeks in 10⁹ samples."""
    return dataseek.measure()


def generations(plan: Plan) -> dict[str, Any]:
    """Generation beside Hugging Face's, and its log-probabilities beside training's."""
    return generation.run(quick=plan.is_quick)


SECTIONS: dict[str, Section] = {
    "one_rank_xs": one_rank_xs,
    "short_rows": short_rows,
    "warm_rerun": warm_rerun,
    "data": data,
    "generation": generations,
    "ddp_2": lambda plan: ddp(plan, 2),
    "ddp_4": lambda plan: ddp(plan, GANG),
    "fsdp2_2": lambda plan: fsdp2(plan, 2),
    "fsdp2_4": lambda plan: fsdp2(plan, GANG),
    "exact": exact,
    "tolerance": tolerance,
    "one_rank_s": one_rank_s,
}

GIVES = {
    "one_rank_xs": (
        "one_rank_over_raw_loop_xs",
        "one_rank_over_lightning",
        "one_rank_over_hf_trainer",
    ),
    "short_rows": (
        "short_rows_over_raw_loop",
        "short_rows_over_lightning",
        "short_rows_over_hf_trainer",
    ),
    "warm_rerun": ("warm_rerun_seconds",),
    "data": ("seek_ms", "data_state_bytes"),
    "generation": ("generate_tokens_per_second_over_hf", "train_generate_logprob_max_diff"),
    "ddp_2": ("tokens_per_second_over_ddp_gloo_2ranks",),
    "ddp_4": ("tokens_per_second_over_ddp_gloo_4ranks", "memory_over_ddp"),
    "fsdp2_2": ("tokens_per_second_over_fsdp2_gloo_2ranks",),
    "fsdp2_4": ("tokens_per_second_over_fsdp2_gloo_4ranks",),
    "exact": ("exact_over_fast",),
    "tolerance": ("fault_tolerance_on_over_off",),
    "one_rank_s": ("one_rank_over_raw_loop_s",),
}
