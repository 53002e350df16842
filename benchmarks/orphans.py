"""`orphans`: processes alive two seconds after a random SIGKILL that are part of no live attempt. The target is none.

Victims are the command line of a tied run, agent, controller, keeper, warm parents, and user processes whose children
double-fork, leave the session and drop their environment. After each kill nothing else is touched until the check is
done; then the cluster must answer and its families must be back before the next. `python -m benchmarks.orphans --kills N
--seed S` is the same as a campaign of its own, which exits 1 when an orphan was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.deaths import ENDLESS
from benchmarks.measure import PROGRAMS, PYTHON, SideFailed, say, scratch, wait_until
from benchmarks.ours import Cluster

SETTLE_SECONDS = 2.0
FAMILIES = 3
LIVE = ("starting", "parked", "running", "ready", "stopping")


def measure_orphans(cluster: Cluster, kills: int, *, seed: int) -> dict[str, Any]:
    """Kill `kills` times; count orphans, and what was killed how often."""
    random_source = random.Random(seed)
    with scratch() as out:
        campaign = Campaign(cluster, out)
        campaign.begin()
        for number in range(kills):
            kind = random_source.choice(
                ["client", "agent", "controller", "keeper", "zygote", "user"]
            )
            campaign.kill(kind, random_source)
            campaign.recover()
            if (number + 1) % 10 == 0:
                say(f"{number + 1}/{kills} kills, {len(campaign.orphans)} orphans")
        campaign.end()
    return {
        "orphans": len(campaign.orphans),
        "orphan_kills": dict(campaign.kills),
        "orphan_seed": seed,
        **({"orphans_after": campaign.orphans[:20]} if campaign.orphans else {}),
    }


class Campaign:
    """The families that run, the kills so far, and the orphans found."""

    def __init__(self, cluster: Cluster, out: Path) -> None:
        self.cluster = cluster
        self.out = out
        self.kills: Counter[str] = Counter()
        self.orphans: list[str] = []
        self._seen: set[tuple[int, int]] = set()
        self._seq = 0
        self._client: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Families by exec and by warm fork, that come back whatever happens; and one tied to its command line."""
        program = str(PROGRAMS / "family.py")
        self.cluster.submit(
            {
                "name": "families",
                "service": True,
                "roles": {
                    "exec": {"command": [str(PYTHON), "-S", program], "count": FAMILIES} | ENDLESS,
                    "fork": {"script": program, "count": FAMILIES} | ENDLESS,
                },
            },
            BENCH_DIR=str(self.out),
        )
        self.recover()

    def kill(self, kind: str, random_source: random.Random) -> None:
        """Kill one of this kind, wait, look for orphans. A kind that has none at the moment becomes a user process."""
        finders: dict[str, Callable[[], list[int]]] = {
            "client": lambda: [self._client.pid] if self._client else [],
            "zygote": lambda: zygotes(self.cluster.pids()["keeper"]),
            "user": lambda: sorted(pid for pid, _, _ in self.members_alive()),
        }
        find = finders.get(kind, lambda: [self.cluster.pids()[kind]])
        pids = find()
        if not pids:
            kind, pids = "user", finders["user"]()
        with contextlib.suppress(ProcessLookupError):
            os.kill(random_source.choice(pids), signal.SIGKILL)
        self.kills[kind] += 1
        time.sleep(SETTLE_SECONDS)
        looked_at = time.time()
        alive = self.members_alive()
        live = self.live_attempts() | self.ended_after(looked_at)
        for pid, start, attempt in alive:
            if attempt not in live and (pid, start) not in self._seen:
                self._seen.add((pid, start))
                self.orphans.append(
                    f"kill {sum(self.kills.values())} of {kind}: pid {pid} of {attempt}"
                )

    def recover(self) -> None:
        """Wait until the cluster answers and the families are back; start the tied client again if it is gone."""

        def is_back() -> bool:
            live = self.live_attempts()
            return len({attempt for _, _, attempt in self.members_alive()} & live) >= 2 * FAMILIES

        wait_until("the families to come back", is_back, timeout_seconds=60.0, every=0.1)
        if self._client is None or self._client.poll() is not None:
            if self._client is not None:
                self.cluster.forget(self._client)
            known = len(list(self.out.glob("family.*")))
            command = [str(PYTHON), "-S", str(PROGRAMS / "family.py")]
            self._client = self.cluster.start("run", "--tied", "--", *command, out=self.out)
            wait_until("the tied family", lambda: len(list(self.out.glob("family.*"))) > known)

    def end(self) -> None:
        """After `argosy down` nothing may be left."""
        self.cluster.down()
        time.sleep(SETTLE_SECONDS)
        self.orphans += [f"after down: pid {pid} of {a}" for pid, _, a in self.members_alive()]

    def members_alive(self) -> list[tuple[int, int, str]]:
        """(pid, start time, attempt) of every recorded member that lives."""
        found = []
        for path in self.out.glob("family.*"):
            with contextlib.suppress(OSError, IndexError):
                attempt, *lines = path.read_text().splitlines()
                pairs = [(int(p), int(s)) for p, s in (line.split() for line in lines)]
                found += [(pid, start, attempt) for pid, start in pairs if start_time(pid) == start]
        return found

    def ended_after(self, looked_at: float) -> set[str]:
        """Attempts that were live at that moment and ended before the controller was asked.

        A tied run is stopped two seconds after its client's death, just when the check looks. What was lost with its
        keeper is never excused by this: it had no owner from the keeper's death on, whenever the log says so.
        """
        found = set()
        while events := self.cluster.get(f"/v1/events?after={self._seq}&limit=1000")["events"]:
            self._seq = events[-1]["seq"]
            for event in events:
                fact = event["fact"]
                is_exit = fact["kind"] == "attempt.exited" and not fact.get("lost", False)
                if is_exit and event["at"] > looked_at:
                    found.add(fact["attempt"])
        return found

    def live_attempts(self) -> set[str]:
        """Attempts that the controller counts as live; waits while it comes back."""

        def ask() -> list[dict[str, Any]] | None:
            try:
                return [{}, *self.cluster.processes()]
            except (OSError, ValueError, SideFailed):
                # The next command of a person would find the cluster gone and start it: so does this one.
                with contextlib.suppress(SideFailed, subprocess.TimeoutExpired):
                    self.cluster.command("ps")
                return None

        processes = wait_until("an answer of the controller", ask, timeout_seconds=60.0, every=0.1)
        return {p["attempt"] for p in processes if p and p["state"] in LIVE}


def zygotes(keeper: int) -> list[int]:
    """Warm parents of this keeper, by their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == keeper and b"argosy.control.zygote" in words and b"--socket" in words:
                found.append(int(entry.name))
    return sorted(found)


def start_time(pid: int) -> int:
    """Start time in ticks; 0 when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


def main() -> int:
    """A campaign from the command line: the last line is the JSON of what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orphans")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(f"{options.kills} kills, seed {options.seed}")
    with scratch() as directory, Cluster(directory) as cluster:
        cluster.up()
        found = measure_orphans(cluster, options.kills, seed=options.seed)
    print(json.dumps(found), flush=True)
    return 1 if found["orphans"] else 0


if __name__ == "__main__":
    sys.exit(main())
