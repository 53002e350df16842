"""Stalled parts: is a process of this cluster stopped (kill -STOP, a debugger), so that questions stay unanswered?

Called by commands whose question has met silence, and by `argosy down --force`. It reads keeper.json and /proc and asks nobody,
so it never waits for the part that is at fault.
"""

from __future__ import annotations

import os
import signal
import time

from argosy.control.home import Cluster
from argosy.control.keeper.census import Seen, kill_seen, look_at
from argosy.control.keeper.records import read_json
from argosy.errors import ClusterError

_STOPPED = "Tt"
_KILL_SECONDS = 5.0
_YOUNG_SECONDS = 10.0


def check_parts(cluster: Cluster) -> None:
    """ClusterError when a part of the cluster is stopped; it names the part and how to let it go on."""
    stopped = {name: seen.pid for name, seen in parts_of(cluster).items() if seen.state in _STOPPED}
    if not stopped:
        return
    names = " and ".join(f"the {name} (pid {pid})" for name, pid in stopped.items())
    raise ClusterError(
        f"{names} {'is' if len(stopped) == 1 else 'are'} stopped and cannot answer; the runs go on",
        fix=f"kill -CONT {' '.join(map(str, stopped.values()))}",
    )


def parts_of(cluster: Cluster) -> dict[str, Seen]:
    """Keeper, controller and agent as far as they are alive."""
    keeper = read_json(cluster.keeper_json)
    services = keeper.get("services")
    recorded = {"keeper": keeper, **(services if isinstance(services, dict) else {})}
    found = {}
    for name, record in recorded.items():
        seen = look_at(int(record.get("pid") or 0))
        if seen is not None and seen.start == record.get("start") and seen.is_alive:
            found[name] = seen
    return found


def is_alive(cluster: Cluster) -> bool:
    """Whether a part is alive and not stopped: each of them brings the others back."""
    return any(seen.state not in _STOPPED for seen in parts_of(cluster).values())


def is_succeeding(cluster: Cluster) -> bool:
    """Whether sockets that are not there will be: the keeper is being replaced, or has just begun. One that has lived for a while has lost them."""
    keeper = parts_of(cluster).get("keeper")
    return is_alive(cluster) and (keeper is None or keeper.age_seconds < _YOUNG_SECONDS)


def resume_parts(cluster: Cluster) -> None:
    """Let every stopped part go on."""
    for seen in parts_of(cluster).values():
        if seen.state in _STOPPED:
            _signal(seen, signal.SIGCONT)


def end_parts(cluster: Cluster, *, grace_seconds: float = 10.0) -> None:
    """End a cluster whose controller does not answer: ask the keeper, and after the grace kill what is left."""
    keeper = parts_of(cluster).get("keeper")
    if keeper is not None:
        _signal(keeper, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds
    while parts := parts_of(cluster):
        if time.monotonic() > deadline + _KILL_SECONDS:
            left = ", ".join(f"{name} {seen.pid}" for name, seen in parts.items())
            raise ClusterError(
                f"parts of the cluster survived SIGKILL: {left}", fix="look at `ps` and `dmesg`"
            )
        if time.monotonic() > deadline:
            for seen in parts.values():
                kill_seen(seen)
        time.sleep(0.02)


def _signal(seen: Seen, number: signal.Signals) -> None:
    try:
        os.kill(seen.pid, number)
    except OSError:
        # It is gone, which is what was wanted, or belongs to somebody else, which keeper.json rules out.
        pass
