"""`launch`: how long until eight torch ranks have done their first all-reduce, and until a gang works again after a kill.

All sides run the same programs interleaved in one run; every round of every side is checked for its result. A ratio is
the median of our rounds over the median of the peer's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    PROGRAMS,
    PYTHON,
    SideFailed,
    median,
    ranks_done,
    ratio,
    rounded,
    say,
    scratch,
    settle,
    spread,
    wait_until,
)
from benchmarks.ours import Cluster, end_process
from benchmarks.peers.drivers import Driver, finish_torchrun, start_torchrun

RANKS = 8
GANG = 4
SETTLED_STEPS = 5

Side = Callable[[], float]


def run(*, quick: bool) -> dict[str, Any]:
    """Measure everything and return the metrics."""
    rounds = 3 if quick else 7
    notes: dict[str, str] = {}
    with scratch() as directory, Cluster(directory) as cluster:
        drivers = start_drivers(directory, notes)
        try:
            sides: dict[str, Side] = {
                "warm": lambda: our_launch(cluster),
                "torchrun": lambda: torchrun_launch(directory),
            }
            sides |= {name: (lambda d=d: d.launch(RANKS)) for name, d in drivers.items()}
            launches = interleave(sides, rounds, notes, before=lambda: warm_up(cluster))
        finally:
            for driver in drivers.values():
                driver.close()
        cold = interleave(
            {
                "cold": lambda: our_cold_launch(cluster),
                "torchrun_cold": lambda: torchrun_launch(directory),
            },
            rounds,
            notes,
        )
        restarts = interleave(
            {
                "restart": lambda: our_restart(cluster, exec_form=False),
                "restart_exec": lambda: our_restart(cluster, exec_form=True),
                "restart_torchrun": lambda: torchrun_restart(directory),
            },
            rounds,
            notes,
            before=lambda: warm_up(cluster),
        )
    return metrics(launches | cold | restarts, notes)


def metrics(times: dict[str, list[float]], notes: dict[str, str]) -> dict[str, Any]:
    middle = {name: median(values) for name, values in times.items()}

    def over(ours: str, theirs: str) -> float | None:
        return rounded(ratio(middle.get(ours), middle.get(theirs)))

    found: dict[str, Any] = {
        "warm_8_torch_ranks_over_torchrun": over("warm", "torchrun"),
        "cold_8_torch_ranks_over_torchrun": over("cold", "torchrun_cold"),
        "warm_8_over_ray": over("warm", "ray"),
        "warm_8_over_monarch": over("warm", "monarch"),
        "gang_restart_over_torchrun": over("restart", "restart_torchrun"),
        "gang_restart_exec_over_torchrun": over("restart_exec", "restart_torchrun"),
    }
    found |= {f"{name}_seconds": rounded(value) for name, value in middle.items()}
    found["spread_seconds"] = {name: spread(values) for name, values in times.items()}
    if notes:
        found["notes"] = notes
    return found


def interleave(
    sides: dict[str, Side], rounds: int, notes: dict[str, str], *, before: Side | None = None
) -> dict[str, list[float]]:
    """Run the sides in turn, `rounds` times; a side that fails is left out from there and its times are dropped."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    if before is not None:
        try:
            before()
        except SideFailed as failure:
            notes["before"] = str(failure)
    for number in range(rounds):
        for name, side in sides.items():
            if name in notes:
                continue
            settle()
            try:
                times[name].append(side())
                say(f"round {number + 1}/{rounds}: {name} {times[name][-1]:.3f} s")
            except (SideFailed, subprocess.TimeoutExpired) as failure:
                say(f"{name} failed: {failure}")
                notes[name] = str(failure)
                times[name] = []
    return times


def start_drivers(directory: Path, notes: dict[str, str]) -> dict[str, Driver]:
    drivers = {}
    for name in ("ray", "monarch"):
        say(f"starting {name}")
        try:
            drivers[name] = Driver(name, directory)
        except SideFailed as failure:
            notes[name] = str(failure)
            say(f"{name} cannot run: {failure}")
    return drivers


def warm_up(cluster: Cluster) -> float:
    """Cluster up, warm parents ready: two launches that nobody counts."""
    cluster.up()
    our_launch(cluster)
    return our_launch(cluster)


def our_launch(cluster: Cluster) -> float:
    """Seconds from before the exec of `argosy run` to the last rank's all-reduce."""
    with scratch() as out:
        started = time.time_ns()
        client = cluster.start(
            "run", "-n", str(RANKS), str(PROGRAMS / "first_allreduce.py"), out=out
        )
        done = ranks_done(out, RANKS)
        cluster.finish(client)
        return (done - started) / 1e9


def our_cold_launch(cluster: Cluster) -> float:
    cluster.down()
    settle()
    return our_launch(cluster)


def torchrun_launch(directory: Path) -> float:
    with scratch() as out:
        started = time.time_ns()
        process = start_torchrun(RANKS, PROGRAMS / "first_allreduce.py", out)
        try:
            done = ranks_done(out, RANKS)
            finish_torchrun(process, out)
        finally:
            end_process(process)
        return (done - started) / 1e9


def our_restart(cluster: Cluster, *, exec_form: bool) -> float:
    program = str(PROGRAMS / "steps.py")
    command = ["--", str(PYTHON), program] if exec_form else [program]
    name = f"restart{time.monotonic_ns()}"
    with scratch() as out:
        client = cluster.start("run", "-n", str(GANG), "--name", name, *command, out=out)
        try:
            return kill_and_wait(out)
        finally:
            cluster.command("stop", name, check=False)
            cluster.forget(client)


def torchrun_restart(directory: Path) -> float:
    with scratch() as out:
        process = start_torchrun(GANG, PROGRAMS / "steps.py", out, restarts=3)
        try:
            return kill_and_wait(out)
        except SideFailed as failure:
            raise SideFailed(f"{failure}; {(out / 'torchrun.log').read_text()[-800:]}")
        finally:
            end_process(process)


def kill_and_wait(out: Path) -> float:
    """Kill one rank of a settled gang; seconds until every rank has finished a step in its new process."""
    wait_until(
        f"{SETTLED_STEPS} steps of {GANG} ranks",
        lambda: all(len(read_steps(out, rank)) >= SETTLED_STEPS for rank in range(GANG)),
        timeout_seconds=90.0,
    )
    old = {rank: read_steps(out, rank)[-1][2] for rank in range(GANG)}
    killed = time.time_ns()
    os.kill(old[2], signal.SIGKILL)
    wait_until(
        "the gang's next step",
        lambda: all(first_step_after(out, rank, old[rank]) for rank in range(GANG)),
        timeout_seconds=90.0,
    )
    check_steps(out)
    return (max(first_step_after(out, rank, old[rank]) for rank in range(GANG)) - killed) / 1e9


def read_steps(out: Path, rank: int) -> list[tuple[int, int, int, int, float]]:
    """(step, time_ns, pid, restarts, weight) of each finished line."""
    try:
        text = (out / f"rank{rank}.steps").read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(int(s), int(t), int(p), int(r), float(w)) for s, t, p, r, w in rows]


def first_step_after(out: Path, rank: int, old_pid: int) -> int:
    return next((row[1] for row in read_steps(out, rank) if row[2] != old_pid), 0)


def check_steps(out: Path) -> None:
    """Each step added the same sum, before and after the kill: nothing was lost and nothing done twice."""
    each = GANG * (GANG + 1) / 2
    for rank in range(GANG):
        for step, _, _, _, weight in read_steps(out, rank):
            if weight != (step + 1) * each:
                raise SideFailed(
                    f"rank {rank}, step {step}: weight {weight}, must be {(step + 1) * each}"
                )
