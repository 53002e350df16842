"""`supervise`: what owning processes costs, and what is lost when a part of the owner dies.

Each section stands alone: one that fails gives null for its metrics and says why, the others still run.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.deaths import (
    measure_deaths,
    measure_readoption,
    newest_event,
    start_idle,
    stop,
)
from benchmarks.measure import (
    PROGRAMS,
    SideFailed,
    median,
    ratio,
    rounded,
    say,
    scratch,
    spread,
)
from benchmarks.orphans import measure_orphans
from benchmarks.ours import Cluster
from benchmarks.peers.drivers import Driver

GROUP = 16
SEED = 20260

METRICS = (
    "peers_told_p99_ms",
    "peers_told_p99_ms_busy",
    "exit_durable_p99_ms",
    "exit_durable_p99_ms_busy",
    "readopt_seconds_max",
    "processes_lost",
    "orphans",
    "events_per_second",
    "queued_runs_per_second",
    "queued_runs_over_ray_tasks",
    "ps_ms",
    "agent_rss_mb",
    "idle_cpu_percent",
)


def run(*, quick: bool) -> dict[str, Any]:
    """Measure everything and return the metrics."""
    sections: dict[str, Callable[[Cluster], dict[str, Any]]] = {
        "events": lambda _: measure_events(20_000 if quick else 100_000),
        "idle": lambda cluster: measure_idle(cluster, 10.0 if quick else 30.0),
        "deaths": lambda cluster: measure_deaths(cluster, 50 if quick else 200),
        "readoption": lambda cluster: measure_readoption(cluster, 3 if quick else 10),
        "queue": lambda cluster: measure_queue(cluster, quick=quick),
        "orphans": lambda cluster: measure_orphans(cluster, 40 if quick else 200, seed=SEED),
    }
    found: dict[str, Any] = dict.fromkeys(METRICS)
    notes: dict[str, str] = {}
    for name, section in sections.items():
        say(f"section {name}")
        with scratch() as directory, Cluster(directory) as cluster:
            try:
                cluster.up()
                found |= section(cluster)
            except (SideFailed, subprocess.TimeoutExpired, OSError, LookupError) as failure:
                notes[name] = f"{type(failure).__name__}: {failure}"
                say(f"{name} failed: {notes[name]}")
    if notes:
        found["notes"] = notes
    return found


def measure_events(count: int) -> dict[str, Any]:
    """Durable events a second: in commits of sixteen, and with many groups in flight, as under load."""
    grouped = [asyncio.run(append_events(count, in_flight=1)) for _ in range(3)]
    pipelined = [asyncio.run(append_events(count, in_flight=64)) for _ in range(3)]
    return {
        "events_per_second": rounded(median([rate for rate, _ in grouped]), 0),
        "events_per_second_spread": spread([rate for rate, _ in grouped]),
        "events_per_commit": rounded(median([size for _, size in grouped]), 1),
        "events_per_second_pipelined": rounded(median([rate for rate, _ in pipelined]), 0),
        "events_per_commit_pipelined": rounded(median([size for _, size in pipelined]), 1),
    }


async def append_events(count: int, *, in_flight: int) -> tuple[float, float]:
    """(events a second, events a commit)"""
    from argosy.control.eventlog import EventLog
    from argosy.protocol.facts import AttemptStarted, Event

    with scratch() as directory:
        log = EventLog(str(directory / "events.sqlite"))
        try:
            fact = AttemptStarted(
                attempt="run-000001/train/0/0", run="run-000001", pid=1234, how="fork"
            )
            started = time.perf_counter()
            for first in range(1, count + 1, GROUP):
                numbers = range(first, min(first + GROUP, count + 1))
                done = log.append(
                    [Event(seq=n, at=1.0, fact=fact, source=("keeper", n)) for n in numbers]
                )
                if log.num_pending >= in_flight:
                    await done
            await done
            seconds = time.perf_counter() - started
            commits = int(log.statistics()["num_commits"])
            stored = sum(1 for _ in log.replay())
        finally:
            log.close()
    if stored != count:
        raise SideFailed(f"{count} events appended, {stored} stored")
    return count / seconds, count / commits


def measure_idle(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """`ps_ms`, `agent_rss_mb`, `idle_cpu_percent`, all with 100 idle processes in care."""
    run_id = start_idle(cluster)
    times = []
    for _ in range(15):
        started = time.perf_counter()
        cluster.command("ps")
        times.append((time.perf_counter() - started) * 1000)
    pids = cluster.pids()
    time.sleep(2.0)  # let what the reads above caused be over; this is idleness, not a condition
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    wakeups = sum(context_switches(pid) for pid in pids.values())
    time.sleep(seconds)
    used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    wakeups = sum(context_switches(pid) for pid in pids.values()) - wakeups
    found = {
        "ps_ms": rounded(median(times), 1),
        "ps_ms_spread": spread(times),
        "idle_wakeups_per_second": rounded(wakeups / seconds, 2),
        "idle_cpu_percent": rounded(sum(used.values()) / seconds * 100, 3),
        **{f"{name}_rss_mb": rounded(rss_mb(pid), 1) for name, pid in pids.items()},
        **{
            f"{name}_idle_cpu_percent": rounded(value / seconds * 100, 3)
            for name, value in used.items()
        },
    }
    stop(cluster, run_id)
    return found


def measure_queue(cluster: Cluster, *, quick: bool) -> dict[str, Any]:
    """Runs a second through the queue, and Ray tasks that start a process each, interleaved."""
    count, tasks = (200, 20) if quick else (1000, 60)
    script = {"script": str(PROGRAMS / "nothing.py"), "cpu_request": 0.25}
    bare = script | {"preload": []}
    command = {"command": ["/bin/true"], "cpu_request": 0.25}
    run_queue(cluster, script, 8)  # the warm parent is there before the clock starts
    found: dict[str, Any] = {}
    ours: list[float] = []
    theirs: list[float] = []
    with scratch() as directory:
        driver = None
        try:
            driver = Driver("ray", directory)
        except SideFailed as failure:
            found["queued_runs_over_ray_tasks_note"] = str(failure)
        for number in range(1 if quick else 2):
            ours.append(run_queue(cluster, script, count))
            say(f"round {number + 1}: {ours[-1]:.1f} runs a second")
            if driver is not None:
                theirs.append(ray_tasks(driver, tasks))
                say(f"round {number + 1}: {theirs[-1]:.1f} Ray tasks a second")
        if driver is not None:
            driver.close()
    found["queued_runs_per_second"] = rounded(median(ours), 1)
    run_queue(cluster, bare, 8)
    found["queued_bare_runs_per_second"] = rounded(run_queue(cluster, bare, count), 1)
    found["queued_commands_per_second"] = rounded(run_queue(cluster, command, count), 1)
    found["ray_tasks_per_second"] = rounded(median(theirs), 2)
    found["queued_runs_over_ray_tasks"] = rounded(ratio(median(ours), median(theirs)), 1)
    return found


def run_queue(cluster: Cluster, role: dict[str, Any], count: int) -> float:
    """Submit an array of no-op runs and wait until the log says that each has succeeded; runs a second."""
    after = newest_event(cluster)
    started = time.perf_counter()
    spec = {"name": "nothing", "queued": True, "array": count, "roles": {"nothing": role}}
    wanted = set(cluster.submit(spec))
    if len(wanted) != count:
        raise SideFailed(f"an array of {count} made {len(wanted)} runs")
    with contextlib.closing(cluster.stream_events(after)) as events:
        for _, event in events:
            fact = event["fact"]
            if fact["kind"] == "run.ended" and fact["run"] in wanted:
                if fact["outcome"] != "succeeded":
                    raise SideFailed(f"a no-op run {fact['outcome']}: {fact.get('reason', '')}")
                wanted.discard(fact["run"])
                if not wanted:
                    return count / (time.perf_counter() - started)
    raise SideFailed(f"the stream of events ended with {len(wanted)} runs unfinished")


def ray_tasks(driver: Driver, count: int) -> float:
    answer = driver.ask(f"tasks {count}")
    if answer["processes"] != count:
        raise SideFailed(f"Ray used {answer['processes']} processes for {count} tasks")
    return count / float(answer["seconds"])


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def context_switches(pid: int) -> int:
    """Of all threads: shows whether a CPU time of zero is real idleness."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if "ctxt_switches:" in line)
    return total


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
