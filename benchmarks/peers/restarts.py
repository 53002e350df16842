"""Peers of recovery: torchrun, which starts the whole gang again from a checkpoint, and torchft, whose survivors go on alone.

Both train the same task with four processes and are killed in the same way (programs/train_restart.py, programs/train_torchft.py). torchrun's rounds are checked
for steps that are missing or have two losses; torchft does not promise either, since it leaves out the samples of a dead replica.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import PROGRAMS, SideFailed, fair_environment, wait_until
from benchmarks.ours import end_process
from benchmarks.peers.drivers import free_port, start_torchrun
from benchmarks.teams import peer_python

GANG = 4
SETTLED_STEPS = 12


class Row(NamedTuple):
    step: int
    time_ns: int
    pid: int
    loss: float


def torchrun_recovery(out: Path, chance: random.Random, task: dict[str, str]) -> float:
    """Seconds from a kill to the first step of the new gang, less one median step."""
    process = start_torchrun(GANG, PROGRAMS / "train_restart.py", out, restarts=3, environment=task)
    try:
        rows = wait_settled(out)
        old = {rank: rows[rank][-1].pid for rank in range(GANG)}
        step_seconds = median_step(rows[0])
        killed = kill(old[chance.randrange(GANG)], chance, step_seconds)
        wait_until(
            "torchrun's next step",
            lambda: all(first_of_other(out, rank, pid) for rank, pid in old.items()),
            timeout_seconds=90.0,
        )
        check_course(out)
        # The step is committed when the first rank is past the barrier that ends it.
        done = min(first_of_other(out, rank, pid) for rank, pid in old.items())
        return (done - killed) / 1e9 - step_seconds
    except SideFailed as failure:
        raise SideFailed(f"{failure}; {(out / 'torchrun.log').read_text()[-800:]}")
    finally:
        end_process(process)


class Torchft:
    """A lighthouse and four replicas; the one that is killed is started again by us, as torchrun would."""

    def __init__(self, out: Path, task: dict[str, str], *, wait_seconds: int) -> None:
        self._python = peer_python("torchft")
        self._out = out
        port = free_port()
        self._environment = fair_environment(
            BENCH_DIR=str(out),
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}",
            BENCH_WAIT_SECONDS=str(wait_seconds),
            PYTHONPATH=str(PROGRAMS.parent.parent / "src"),
            **task,
        )
        # With five seconds, the settings of torchft's own example.
        self._lighthouse = self._spawn(
            str(self._python.parent / "torchft_lighthouse"),
            *("--bind", f"[::]:{port}", "--min_replicas", "1"),
            *("--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
            *("--heartbeat_timeout_ms", str(1000 * wait_seconds)),
        )
        self._replicas = {number: self._replica(number) for number in range(GANG)}

    def recovery(self, chance: random.Random) -> float:
        """Seconds from a kill to the survivors' next committed step, less one median step."""
        pids = {number: process.pid for number, process in self._replicas.items()}
        rows = wait_settled(self._out, pids)
        step_seconds = median_step(rows[0])
        victim = chance.randrange(GANG)
        killed = kill(pids[victim], chance, step_seconds)
        self._replicas[victim].wait()
        survivors = [number for number in range(GANG) if number != victim]
        done = wait_until(
            "the survivors' next commit",
            lambda: self._committed_after(survivors, killed),
            timeout_seconds=90.0,
        )
        self._replicas[victim] = self._replica(victim)
        return (done - killed) / 1e9 - step_seconds

    def close(self) -> None:
        for process in [*self._replicas.values(), self._lighthouse]:
            process.kill()
            process.wait()

    def log_tail(self) -> str:
        return (self._out / "torchft.log").read_text(errors="replace")[-1500:]

    def _committed_after(self, numbers: list[int], killed: int) -> int:
        found = [
            next((row.time_ns for row in read_rows(self._out, n) if row.time_ns > killed), 0)
            for n in numbers
        ]
        return min(found) if all(found) else 0

    def _replica(self, number: int) -> subprocess.Popen[bytes]:
        program = str(PROGRAMS / "train_torchft.py")
        return self._spawn(str(self._python), program, str(number), str(GANG))

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._out / "torchft.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=self._environment,
                cwd=self._out,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


def kill(pid: int, chance: random.Random, step_seconds: float) -> int:
    """SIGKILL at a random moment of a step; when (ns)."""
    time.sleep(chance.random() * step_seconds)
    killed = time.time_ns()
    os.kill(pid, signal.SIGKILL)
    return killed


def wait_settled(out: Path, pids: dict[int, int] | None = None) -> dict[int, list[Row]]:
    """Until every rank has done some steps in its present process."""

    def settled() -> dict[int, list[Row]]:
        rows = {rank: read_rows(out, rank) for rank in range(GANG)}
        newest = {
            rank: [row for row in rows[rank] if pids is None or row.pid == pids[rank]]
            for rank in rows
        }
        return rows if all(len(own) >= SETTLED_STEPS for own in newest.values()) else {}

    return wait_until(f"{SETTLED_STEPS} steps of each rank", settled, timeout_seconds=120.0)


def read_rows(out: Path, rank: int) -> list[Row]:
    try:
        text = (out / f"rank{rank}.steps").read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Row(int(step), int(at), int(pid), float(loss)) for step, at, pid, loss in rows]


def first_of_other(out: Path, rank: int, old_pid: int) -> int:
    return next((row.time_ns for row in read_rows(out, rank) if row.pid != old_pid), 0)


def median_step(rows: list[Row]) -> float:
    times = [row.time_ns for row in rows[-SETTLED_STEPS:]]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) / 1e9


def check_course(out: Path) -> None:
    """No step is missing, and a step done twice has the same loss: the checkpoint was really loaded."""
    for rank in range(GANG):
        losses: dict[int, float] = {}
        for row in read_rows(out, rank):
            if abs(losses.setdefault(row.step, row.loss) - row.loss) > 1e-4 * abs(row.loss):
                raise SideFailed(
                    f"rank {rank}: step {row.step} has losses {losses[row.step]} and {row.loss}"
                )
        if sorted(losses) != list(range(max(losses) + 1)):
            raise SideFailed(f"rank {rank} has lost steps")
