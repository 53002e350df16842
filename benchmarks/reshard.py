"""`reshard`: moving a sharded state between two layouts on one host, against memcpy of the same bytes and full_tensor() over Gloo.

Each case runs in ranks of its own, forked by programs/reshard_ranks.py; a case that fails gives null and says why.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from benchmarks.measure import (
    PROGRAMS,
    PYTHON,
    SideFailed,
    fair_environment,
    ratio,
    rounded,
    say,
    spread,
)

CASES = ("shard0x2_to_shard1x2", "2_to_3", "4_to_2", "hsdp_to_tp")
# Metric, key in a case's result, digits; the metric without a case's name is the largest of all cases.
METRICS = (
    ("reshard_bytes_over_lower_bound", "bytes_over_lower_bound", 4),
    ("reshard_time_over_memcpy", "over_memcpy", 3),
    ("reshard_extra_mib", "extra_mib", 2),
)


def run(*, quick: bool) -> dict[str, Any]:
    """Measure all cases and return the metrics."""
    found: dict[str, Any] = {name: None for name, _, _ in METRICS}
    notes: dict[str, str] = {}
    results: dict[str, dict[str, Any]] = {}
    for case in CASES:
        say(f"case {case}")
        try:
            results[case] = measure(case, rounds=7 if quick else 21, mebibytes=128)
        except (SideFailed, subprocess.TimeoutExpired) as failure:
            notes[case] = str(failure)
            say(f"{case} failed: {failure}")
    for metric, key, digits in METRICS:
        for case in CASES:
            value = results[case][key] if case in results else None
            found[f"{metric}_{case}"] = rounded(value, digits)
        if len(results) == len(CASES):
            found[metric] = rounded(max(result[key] for result in results.values()), digits)
    for case, result in results.items():
        seconds, times = result["seconds"], result["times"]
        found[f"reshard_time_over_full_tensor_{case}"] = rounded(
            ratio(seconds["ours"], seconds["gloo"]), 4
        )
        found[f"reshard_once_over_memcpy_{case}"] = rounded(
            ratio(seconds["once"], seconds["memcpy"]), 3
        )
        found[f"reshard_spread_seconds_{case}"] = spread(times["ours"])
        found[f"memcpy_spread_seconds_{case}"] = spread(times["memcpy"])
    if notes:
        found["notes"] = notes
    return found


def measure(case: str, *, rounds: int, mebibytes: int) -> dict[str, Any]:
    """One case in ranks of its own."""
    command = [PYTHON, PROGRAMS / "reshard_ranks.py", case, str(rounds), str(mebibytes)]
    done = subprocess.run(
        command, env=fair_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise SideFailed(f"{case} ended with {done.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
