"""SIGKILL of a rank at random points of collectives and of exchanges: is everybody told in time, is anything torn or left behind?

Part of `collectives` and of `exchange`; the totals of both kinds are the metrics `peer_kill_trials`, `typed_errors_within_1s`,
`torn_versions_seen` and `leaks`, each kind's own have its name in front.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from benchmarks import exchangekills
from benchmarks.measure import PROGRAMS, PYTHON, SideFailed, fair_environment, rounded, say

RANKS = 3
SECONDS = 600.0
COLLECTIVE_SEED = 7300
EXCHANGE_SEED = 20260
TOTALS = ("peer_kill_trials", "typed_errors_within_1s", "torn_versions_seen", "leaks")


def measure(*, quick: bool) -> dict[str, Any]:
    """Both kinds, equally often, and their totals."""
    trials = 20 if quick else 100
    found = in_collectives(trials) | exchangekills.measure(trials, seed=EXCHANGE_SEED)
    return found | totals(found)


def totals(found: dict[str, Any]) -> dict[str, int]:
    """The sums over all kinds; a kind that does not know a metric adds nothing."""
    return {
        name: sum(found.get(f"{kind}_{name}", 0) for kind in ("collectives", "exchange"))
        for name in TOTALS
    }


def in_collectives(num_trials: int) -> dict[str, Any]:
    """At random moments of random collectives."""
    seeds = "\n".join(str(COLLECTIVE_SEED + index) for index in range(num_trials))
    done = subprocess.run(
        [str(PYTHON), str(PROGRAMS / "doomed_collectives.py"), str(RANKS)],
        input=seeds,
        env=fair_environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    if len(trials) != num_trials:
        raise SideFailed(f"{len(trials)} of {num_trials} trials ended: {done.stderr[-500:]}")
    for bad in (entry for entry in trials if not entry["is_typed"]):
        say(f"a kill without a typed error: {bad['why']}")
    times = [entry["seconds"] for entry in trials if entry["is_typed"]]
    return {
        "collectives_peer_kill_trials": num_trials,
        "collectives_typed_errors_within_1s": sum(seconds <= 1.0 for seconds in times),
        "collectives_slowest_error_seconds": rounded(max(times, default=None), 3),
        "collectives_leaks": sum(entry.get("leaks", 0) for entry in trials),
    }
