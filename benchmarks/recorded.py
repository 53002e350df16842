"""Training runs whose commits are on record: started on a cluster of our own, watched by the files their processes write.

`programs/train_recorded.py` writes one file per process; a step's loss is recorded by its bits, so that two records say whether the same
samples went into the same weights. Used by the benchmarks `recover` and `exact`.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import PROGRAMS, PYTHON, SideFailed, fair_environment, wait_until
from benchmarks.ours import Cluster, end_process, is_alive

# Faults are sent on purpose, again and again: no budget may end the run.
ENDLESS = {
    "restart": "transient",
    "budget": {"user": 1000000, "host": 1000000, "hang": 1000000, "no_progress": 0},
    "backoff": {"first_seconds": 0.0, "most_seconds": 0.5},
}


class Commit(NamedTuple):
    step: int
    time_ns: int
    rank: int
    world_size: int
    loss: str
    """Its bits: float.hex."""
    tokens: int


class Recorded:
    """One run on a cluster; `out` is its directory of records."""

    def __init__(self, cluster: Cluster, out: Path, ranks: int, **environment: str) -> None:
        self.cluster = cluster
        self.out = out
        role: dict[str, Any] = {
            "script": str(PROGRAMS / "train_recorded.py"),
            "count": ranks,
            "gang": True,
            "min": 1,
        }
        spec = {"name": f"recorded{time.monotonic_ns()}", "roles": {"train": role | ENDLESS}}
        self.run = cluster.submit(spec, BENCH_DIR=str(out), **environment)[0]

    def view(self) -> dict[str, Any]:
        """What the controller says; it may be dead on purpose, and is waited for."""

        def ask() -> dict[str, Any]:
            try:
                found: dict[str, Any] = self.cluster.get(f"/v1/runs/{self.run}")
            except (OSError, ValueError, HTTPException, SideFailed):
                return {}
            return found

        return wait_until("an answer of the controller", ask, timeout_seconds=30.0, every=0.02)

    def pids(self) -> dict[int, int]:
        """Living members, rank -> pid."""
        found = {}
        for role in self.view()["roles"]:
            for process in role["processes"]:
                if process["state"] in ("running", "ready") and process["pid"]:
                    found[process["index"]] = int(process["pid"])
        return {rank: pid for rank, pid in found.items() if is_alive(pid)}

    def commits(self, pid: int) -> list[Commit]:
        return read_commits(self.out / f"{pid}.steps")

    def all_commits(self) -> list[Commit]:
        return [commit for path in self.out.glob("*.steps") for commit in read_commits(path)]

    def newest_step(self) -> int:
        return max((c.step for c in self.all_commits()), default=-1)

    def wait_strength(
        self, ranks: int, *, commits: int = 5, timeout_seconds: float = 60.0
    ) -> dict[int, int]:
        """Until so many members live and each has this many commits on record; rank -> pid."""

        def found() -> dict[int, int]:
            pids = self.pids()
            is_full = len(pids) == ranks
            return (
                pids
                if is_full and all(len(self.commits(p)) >= commits for p in pids.values())
                else {}
            )

        return wait_until(
            f"{ranks} ranks with {commits} commits each", found, timeout_seconds=timeout_seconds
        )

    def wait_step(self, step: int, *, timeout_seconds: float = 60.0) -> None:
        wait_until(
            f"step {step}", lambda: self.newest_step() >= step, timeout_seconds=timeout_seconds
        )

    def wait_world(self, ranks: int, *, timeout_seconds: float = 60.0) -> int:
        """Until so many ranks have committed a step together; that step."""
        return wait_until(
            f"a step of {ranks} ranks",
            lambda: max((c.step for c in self.all_commits() if c.world_size == ranks), default=0),
            timeout_seconds=timeout_seconds,
        )

    def wait_end(self, *, timeout_seconds: float = 120.0) -> str:
        """The run's outcome."""
        wait_until(
            "the run's end",
            lambda: self.view()["state"] == "ended",
            timeout_seconds=timeout_seconds,
            every=0.05,
        )
        return str(self.view()["outcome"])

    def digest(self) -> str:
        """What all processes that finished said."""
        return read_digest(self.out)

    def stop(self) -> None:
        if self.view()["state"] != "ended":
            self.cluster.post(f"/v1/runs/{self.run}/stop", {"hard": True, "reason": "measured"})
            self.wait_end(timeout_seconds=30.0)


def run_alone(out: Path, ranks: int, *, timeout_seconds: float = 600.0, **environment: str) -> str:
    """`python train_recorded.py -n RANKS` without a cluster, to its end; the digest."""
    command = [str(PYTHON), str(PROGRAMS / "train_recorded.py"), "-n", str(ranks)]
    process = subprocess.Popen(
        command,
        env=fair_environment(BENCH_DIR=str(out), **environment),
        cwd=out,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    finally:
        end_process(process)
    if process.returncode != 0:
        raise SideFailed(
            f"{ranks} ranks exited {process.returncode}: {output[-1200:].decode(errors='replace')}"
        )
    return read_digest(out)


def read_commits(path: Path) -> list[Commit]:
    """The whole lines of one process's record."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [
        Commit(int(step), int(at), int(rank), int(world), loss, int(tokens))
        for step, at, rank, world, loss, tokens in (row for row in rows if row[0] != "digest")
    ]


def read_digest(out: Path) -> str:
    """The digest that the last processes wrote; all must say the same."""
    found = set()
    for path in out.glob("*.steps"):
        lines = path.read_text().splitlines()
        found |= {line.split()[1] for line in lines if line.startswith("digest ")}
    if len(found) != 1:
        raise SideFailed(f"{len(found)} different digests in {out}: {sorted(found)}")
    return found.pop()


def losses_by_step(commits: list[Commit]) -> dict[int, set[str]]:
    """All bits of losses on record for each step; more than one for a step: it was done twice, with other samples."""
    found: dict[int, set[str]] = {}
    for commit in commits:
        found.setdefault(commit.step, set()).add(commit.loss)
    return found


def median_step_seconds(commits: list[Commit], last: int = 20) -> float:
    """Of the newest steps of one process."""
    times = [commit.time_ns for commit in commits[-last - 1 :]]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) / 1e9
