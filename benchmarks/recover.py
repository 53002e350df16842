"""`recover`: how long training stands still after a kill or a hang, beside torchrun's restart and torchft's quorum.

XS, four ranks. Our ranks are killed or stopped at random moments of a run that goes on all the time; a peer's time is measured in the same way
from its own records. One median step is subtracted on all sides: that much time passes between two commits without any fault.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from benchmarks.measure import (
    SideFailed,
    median,
    percentile,
    ratio,
    rounded,
    say,
    scratch,
    settle,
    spread,
    wait_until,
)
from benchmarks.ours import Cluster, is_alive
from benchmarks.peers.restarts import Torchft, torchrun_recovery
from benchmarks.recorded import Commit, Recorded, median_step_seconds
from benchmarks.teams import peer_versions
from benchmarks.tokenfile import write_tokens

GANG = 4
SEED = 4100
HANG_STEPS = 3
# How long torchft waits in a collective and for a heartbeat: as in its own example, and the least that is a whole second.
WAIT_SECONDS = {"torchft": 5, "torchft_tuned": 1}


def run(
    *, quick: bool, trials: int | None = None, only: str = "", seed: int | None = None
) -> dict[str, Any]:
    """Measure kills, hangs and the peers; `only` names sections."""
    chance = random.Random(SEED if seed is None else seed)
    metrics: dict[str, Any] = {}
    notes: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    with scratch() as directory:
        task = {"BENCH_SIZE": "XS", "BENCH_TOKENS": str(write_tokens(directory))}
        sections: dict[str, Callable[[], dict[str, Any]]] = {
            "kills": lambda: kills(task, chance, trials or (5 if quick else 100), times),
            "hangs": lambda: hangs(task, chance, trials or (3 if quick else 40)),
            "torchrun": lambda: torchrun(task, chance, 2 if quick else 11, times),
            "torchft": lambda: torchft("torchft", task, chance, 2 if quick else 11, times),
            "torchft_tuned": lambda: torchft(
                "torchft_tuned", task, chance, 2 if quick else 11, times
            ),
        }
        for name, section in sections.items():
            if only and name not in only.split(","):
                continue
            settle()
            say(f"recover: {name}")
            try:
                metrics |= section()
            except (SideFailed, subprocess.TimeoutExpired) as failure:
                say(f"recover: {name} failed: {failure}")
                notes[name] = str(failure)[-600:]
                metrics |= dict.fromkeys(GIVES[name])
    for peer in ("torchrun", "torchft", "torchft_tuned"):
        value = rounded(ratio(median(times.get("kills", [])), median(times.get(peer, []))))
        metrics[f"recover_over_{peer}"] = value
    metrics["spread_seconds"] = {name: spread(values) for name, values in times.items()}
    metrics["versions"] = peer_versions("torchft", ("torch", "torchft", "torchft-nightly"))
    if notes:
        metrics["notes"] = notes
    return metrics


def kills(
    task: dict[str, str], chance: random.Random, trials: int, times: dict[str, list[float]]
) -> dict[str, Any]:
    """SIGKILL of one rank after the other."""
    first, second, whole = [], [], []
    with scratch() as directory, Cluster(directory) as cluster, scratch() as out:
        cluster.up()
        recorded = Recorded(cluster, out, GANG, **task)
        for number in range(trials):
            victim, others, step_seconds = choose_victim(recorded, chance)
            killed = time.time_ns()
            os.kill(victim, signal.SIGKILL)
            one, two = wait_until(
                "two commits after a kill",
                lambda others=others, killed=killed: commits_after(recorded, others, killed, 2),
                timeout_seconds=60.0,
            )
            first.append((one - killed) / 1e9 - step_seconds)
            second.append((two - killed) / 1e9 - 2 * step_seconds)
            recorded.wait_strength(GANG, commits=1)
            whole.append((time.time_ns() - killed) / 1e9)
            if (number + 1) % max(1, trials // 5) == 0:
                say(f"{number + 1}/{trials} kills: median {median(first):.3f} s beyond a step")
        check_record(recorded.all_commits())
        recorded.stop()
    times["kills"] = first
    return {
        "kill_to_next_commit_minus_step_seconds_p50": rounded(percentile(first, 0.5)),
        "kill_to_next_commit_minus_step_seconds_p95": rounded(percentile(first, 0.95)),
        "kill_to_second_commit_minus_two_steps_seconds_p50": rounded(percentile(second, 0.5)),
        "kill_to_second_commit_minus_two_steps_seconds_p95": rounded(percentile(second, 0.95)),
        "kill_to_full_strength_seconds_p50": rounded(percentile(whole, 0.5)),
        "kill_trials": trials,
    }


def hangs(task: dict[str, str], chance: random.Random, trials: int) -> dict[str, Any]:
    """SIGSTOP of one rank after the other: until the others commit again, and whether the right one was ended."""
    beyond, right = [], 0
    with scratch() as directory, Cluster(directory) as cluster, scratch() as out:
        cluster.up()
        recorded = Recorded(cluster, out, GANG, **task)
        for number in range(trials):
            victim, others, step_seconds = choose_victim(recorded, chance)
            descriptor = os.pidfd_open(victim)
            stopped = time.time_ns()
            os.kill(victim, signal.SIGSTOP)
            try:
                ended = wait_ended(descriptor, timeout_seconds=60.0)
            finally:
                os.close(descriptor)
                if is_alive(victim):
                    os.kill(victim, signal.SIGCONT)
            (done,) = wait_until(
                "a commit after a hang",
                lambda others=others, ended=ended: commits_after(recorded, others, ended, 1),
                timeout_seconds=60.0,
            )
            beyond.append((done - stopped) / 1e9 - HANG_STEPS * step_seconds)
            right += all(is_alive(pid) for pid in others)
            say(f"hang {number + 1}/{trials}: {beyond[-1]:.2f} s beyond {HANG_STEPS} steps")
        check_record(recorded.all_commits())
        recorded.stop()
    return {
        "hang_to_recovery_seconds": rounded(percentile(beyond, 0.5)),
        "hang_to_recovery_seconds_p95": rounded(percentile(beyond, 0.95)),
        "suspect_right": rounded(right / trials),
        "hang_trials": trials,
    }


def torchrun(
    task: dict[str, str], chance: random.Random, trials: int, times: dict[str, list[float]]
) -> dict[str, Any]:
    found = times.setdefault("torchrun", [])
    for number in range(trials):
        settle()
        with scratch() as out:
            found.append(torchrun_recovery(out, chance, task))
        say(f"torchrun {number + 1}/{trials}: {found[-1]:.2f} s beyond a step")
    return {"torchrun_recover_seconds": rounded(median(found), 3)}


def torchft(
    name: str,
    task: dict[str, str],
    chance: random.Random,
    trials: int,
    times: dict[str, list[float]],
) -> dict[str, Any]:
    found: list[float] = []
    with scratch() as out:
        group = Torchft(out, task, wait_seconds=WAIT_SECONDS[name])
        try:
            for number in range(trials):
                found.append(group.recovery(chance))
                say(f"{name} {number + 1}/{trials}: {found[-1]:.2f} s beyond a step")
        except SideFailed as failure:
            raise SideFailed(f"{failure}; {group.log_tail()}")
        finally:
            group.close()
    times[name] = found
    return {f"{name}_recover_seconds": rounded(median(found), 3)}


def choose_victim(recorded: Recorded, chance: random.Random) -> tuple[int, list[int], float]:
    """When all ranks are there and have settled, at a random moment of a step: one of them, the others, and the median step."""
    pids = recorded.wait_strength(GANG, commits=12)
    victim = pids[chance.choice(sorted(pids))]
    others = [pid for pid in pids.values() if pid != victim]
    step_seconds = median_step_seconds(recorded.commits(others[0]))
    time.sleep(chance.random() * step_seconds)
    return victim, others, step_seconds


def commits_after(recorded: Recorded, pids: list[int], after_ns: int, count: int) -> list[int]:
    """When the first steps after a moment were first seen committed by any of these processes."""
    times: dict[int, int] = {}
    for pid in pids:
        for commit in recorded.commits(pid):
            if commit.time_ns > after_ns:
                times[commit.step] = min(times.get(commit.step, commit.time_ns), commit.time_ns)
    found = sorted(times.values())
    return found[:count] if len(found) >= count else []


def wait_ended(descriptor: int, *, timeout_seconds: float) -> int:
    """When a process ended (ns), seen by its descriptor."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(1000 * timeout_seconds):
        raise SideFailed(f"a stopped rank was not ended in {timeout_seconds:g} s")
    return time.time_ns()


def check_record(commits: list[Commit]) -> None:
    """Every step was committed, once, with one loss."""
    losses: dict[int, str] = {}
    for commit in commits:
        if losses.setdefault(commit.step, commit.loss) != commit.loss:
            raise SideFailed(f"step {commit.step} has two losses on record")
    if sorted(losses) != list(range(len(losses))):
        raise SideFailed("steps are missing on record")


GIVES = {
    "kills": (
        "kill_to_next_commit_minus_step_seconds_p50",
        "kill_to_next_commit_minus_step_seconds_p95",
    ),
    "hangs": ("hang_to_recovery_seconds", "suspect_right"),
    "torchrun": (),
    "torchft": (),
    "torchft_tuned": (),
}
