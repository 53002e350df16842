"""How soon a death is known: to the peers over their links, and durably in the event log. Also: what a dead controller and
agent cost.

Deaths are SIGKILLs sent by the benchmark, the clock is CLOCK_MONOTONIC of this host on both ends. Durable means: the event log's stream,
which shows committed events only, delivered the exit to a client.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import (
    PROGRAMS,
    PYTHON,
    SideFailed,
    percentile,
    rounded,
    say,
    scratch,
    wait_until,
)
from benchmarks.ours import Cluster, is_alive

MEMBERS = 5
IDLE_PROCESSES = 100

# Killed on purpose, again and again: no budget may end the run.
ENDLESS = {
    "restart": "permanent",
    "budget": {"user": 1000000, "host": 1000000, "no_progress": 0},
    "backoff": {"first_seconds": 0.0, "most_seconds": 0.5},
}


def measure_deaths(cluster: Cluster, kills: int) -> dict[str, Any]:
    """`peers_told_p99_ms` and `exit_durable_p99_ms`, idle and beside four busy processes."""
    found: dict[str, Any] = {}
    for suffix in ("", "_busy"):
        busy = start_busy(cluster) if suffix else ""
        try:
            told, durable = kill_members(cluster, kills)
        finally:
            if busy:
                stop(cluster, busy)
        found[f"peers_told_p99_ms{suffix}"] = rounded(percentile(told, 0.99), 2)
        found[f"peers_told_median_ms{suffix}"] = rounded(percentile(told, 0.5), 2)
        found[f"exit_durable_p99_ms{suffix}"] = rounded(percentile(durable, 0.99), 2)
        found[f"exit_durable_median_ms{suffix}"] = rounded(percentile(durable, 0.5), 2)
    for name, pid in cluster.pids().items():
        found[f"nice_{name}"] = os.getpriority(os.PRIO_PROCESS, pid)
    return found


def start_busy(cluster: Cluster) -> str:
    role = {"command": [str(PYTHON), "-S", "-c", "while True: pass"], "count": 4}
    run = cluster.submit({"name": "busy", "roles": {"spin": role}})[0]
    wait_for_processes(cluster, run, 4)
    return run


def kill_members(cluster: Cluster, kills: int) -> tuple[list[float], list[float]]:
    """Kill one member after the other; (ms until the last peer was told, ms until the exit was durable) of each."""
    told: list[float] = []
    durable: list[float] = []
    with scratch() as out, exits(cluster) as arrivals:
        role = {
            "command": [str(PYTHON), "-S", str(PROGRAMS / "member.py")],
            "count": MEMBERS,
        } | ENDLESS
        run = cluster.submit({"name": "members", "roles": {"member": role}}, BENCH_DIR=str(out))[0]
        try:
            for number in range(kills):
                members = wait_until("all members linked", lambda: linked(cluster, run, out))
                victim = members[number % MEMBERS]
                killed = time.monotonic_ns()
                os.kill(victim["pid"], signal.SIGKILL)
                others = [m["pid"] for m in members if m is not victim]
                told.append(wait_told(out, others, victim["attempt"], killed))
                wait_until(
                    "the exit in the event log",
                    lambda attempt=victim["attempt"]: attempt in arrivals,
                    every=0.002,
                )
                durable.append((arrivals[victim["attempt"]] - killed) / 1e6)
                if (number + 1) % 50 == 0:
                    say(f"{number + 1}/{kills} deaths")
        finally:
            stop(cluster, run)
    return told, durable


def linked(cluster: Cluster, run: str, out: Path) -> list[dict[str, Any]]:
    """The run's live processes, if all have their link."""
    members = live_processes(cluster, run)
    has_links = all(
        (out / f"member.{m['pid']}").exists()
        and (out / f"member.{m['pid']}").read_text().startswith(f"up {m['attempt']}\n")
        for m in members
    )
    return members if len(members) == MEMBERS and has_links else []


def wait_told(out: Path, pids: list[int], attempt: str, killed: int) -> float:
    """Milliseconds until the last of these members was told of the death."""

    def times() -> list[int]:
        lines = [line for pid in pids for line in (out / f"member.{pid}").read_text().splitlines()]
        found = [int(line.split()[2]) for line in lines if line.startswith(f"told {attempt} ")]
        return found if len(found) >= len(pids) else []

    return (max(wait_until("all peers told", times, every=0.002)) - killed) / 1e6


@contextlib.contextmanager
def exits(cluster: Cluster) -> Any:
    """Arrival times (monotonic ns) of exits in the event log's stream, by attempt, kept by a thread."""
    arrivals: dict[str, int] = {}
    after = newest_event(cluster)
    stopping = threading.Event()

    def follow() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            for at, event in cluster.stream_events(after):
                if event["fact"]["kind"] == "attempt.exited":
                    arrivals.setdefault(event["fact"]["attempt"], at)
                if stopping.is_set():
                    return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield arrivals
    finally:
        stopping.set()


def newest_event(cluster: Cluster) -> int:
    after = 0
    while events := cluster.get(f"/v1/events?after={after}&limit=1000")["events"]:
        after = events[-1]["seq"]
    return after


def measure_readoption(cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Kill controller and agent at once with 100 idle processes; seconds until new ones own all of them again."""
    run = start_idle(cluster)
    before = {p["attempt"]: p["pid"] for p in live_processes(cluster, run)}
    seconds = []
    for number in range(rounds):
        seconds.append(kill_and_readopt(cluster, run, before))
        say(f"round {number + 1}/{rounds}: readopted in {seconds[-1]:.3f} s")
    lost = sum(not is_alive(pid) for pid in before.values())
    now = {p["attempt"]: p["pid"] for p in live_processes(cluster, run)}
    lost = max(lost, sum(now.get(attempt) != pid for attempt, pid in before.items()))
    return {
        "readopt_seconds_max": rounded(max(seconds), 3),
        "readopt_seconds_median": rounded(percentile(seconds, 0.5), 3),
        "processes_lost": lost,
    }


def start_idle(cluster: Cluster) -> str:
    role = {"command": ["/bin/sleep", "1000000"], "count": IDLE_PROCESSES}
    run = cluster.submit({"name": "idle", "roles": {"idle": role}})[0]
    wait_for_processes(cluster, run, IDLE_PROCESSES)
    return run


def kill_and_readopt(cluster: Cluster, run: str, expected: dict[str, int]) -> float:
    old = cluster.pids()
    started = time.monotonic()
    for name in ("controller", "agent"):
        os.kill(old[name], signal.SIGKILL)

    def owns_all() -> bool:
        try:
            pids = cluster.get("/v1/status", timeout_seconds=2.0)["pids"]
            if any(not pids.get(n) or int(pids[n]) == old[n] for n in ("controller", "agent")):
                return False
            now = {p["attempt"]: p["pid"] for p in live_processes(cluster, run)}
        except (SideFailed, OSError, ValueError):
            return False
        return now == expected

    wait_until("controller and agent to own all again", owns_all, timeout_seconds=30.0, every=0.005)
    return time.monotonic() - started


def live_processes(cluster: Cluster, run: str) -> list[dict[str, Any]]:
    """Started and not exited, by index."""
    view = cluster.get(f"/v1/runs/{run}")
    found = [
        process
        for role in view["roles"]
        for process in role["processes"]
        if process["state"] in ("running", "ready") and process["pid"]
    ]
    return sorted(found, key=lambda process: process["index"])


def wait_for_processes(cluster: Cluster, run: str, count: int) -> None:
    wait_until(f"{count} processes", lambda: len(live_processes(cluster, run)) == count)


def stop(cluster: Cluster, run: str) -> None:
    cluster.post(f"/v1/runs/{run}/stop", {"hard": True, "reason": "measured"})
    wait_until("the run's end", lambda: cluster.get(f"/v1/runs/{run}")["state"] == "ended")
