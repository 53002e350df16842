"""`checkpoint`: durable saves, cold loads, and what a save beside training costs, against torch's own ways and the bare disk.

Each section runs in a process of its own (programs/checkpoint_sides.py), its sides in turns; a section that fails gives null and says why.
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
    median,
    ratio,
    rounded,
    say,
    scratch,
    spread,
)

SECTIONS = ("saves", "stalls")


def run(
    *, quick: bool, only: str = "", trials: int | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Measure the sections that were asked for, and return the metrics."""
    del seed  # nothing here is chosen by chance
    chosen = [name for name in SECTIONS if not only or name in only.split(",")]
    rounds = trials or (3 if quick else 7)
    found: dict[str, Any] = {}
    notes: dict[str, str] = {}
    for section in chosen:
        say(f"section {section}")
        try:
            result = measure(section, rounds=rounds, mebibytes=400 if quick else 1500)
            found |= {"saves": of_saves, "stalls": of_stalls}[section](result)
        except (SideFailed, subprocess.TimeoutExpired) as failure:
            notes[section] = str(failure)
            say(f"{section} failed: {failure}")
    return found | ({"notes": notes} if notes else {})


def of_saves(result: dict[str, Any]) -> dict[str, Any]:
    """Durable saves and cold loads."""
    seconds = {side: median(times) for side, times in result["seconds"].items()}
    cpu = {side: median(times) for side, times in result["cpu"].items()}
    loads = {side: median(times) for side, times in result["loads"].items()}
    gigabytes = result["num_bytes"] / 1e9
    return {
        "state_gb": rounded(gigabytes, 3),
        "save_speedup_over_dcp": rounded(ratio(seconds["dcp"], seconds["ours"]), 2),
        "save_speedup_over_torch_save_fsync": rounded(ratio(seconds["torch"], seconds["ours"]), 2),
        "save_over_raw_direct": rounded(ratio(seconds["raw"], seconds["ours"]), 3),
        "staged_save_over_raw_direct": rounded(ratio(seconds["raw"], seconds["writer"]), 3),
        "cpu_seconds_per_gb_over_dcp": rounded(ratio(cpu["ours"], cpu["dcp"]), 3),
        "cpu_seconds_per_gb": rounded((cpu["ours"] or 0) / gigabytes, 3),
        "writer_cpu_seconds_per_gb": rounded((cpu["writer"] or 0) / gigabytes, 3),
        "load_speedup_over_dcp": rounded(ratio(loads["dcp"], loads["ours"]), 2),
        "load_over_raw_direct": rounded(ratio(loads["raw"], loads["ours"]), 3),
        "save_spread_seconds": {side: spread(one) for side, one in result["seconds"].items()},
        "load_spread_seconds": {side: spread(one) for side, one in result["loads"].items()},
    }


def of_stalls(result: dict[str, Any]) -> dict[str, Any]:
    """What training feels of a save."""
    stalls = {side: median(times) for side, times in result["stalls"].items()}
    losses = {side: median(times) for side, times in result["losses"].items()}
    return {
        "stall_over_dcp_async": rounded(ratio(stalls["ours"], stalls["dcp"])),
        "stall_over_dcp_async_reused_stager": rounded(ratio(stalls["ours"], stalls["reused"])),
        "step_inflation_until_durable_over_dcp_async": rounded(
            ratio(losses["ours"], losses["dcp"])
        ),
        "stall_spread_seconds": {side: spread(one) for side, one in result["stalls"].items()},
        "inflation_spread_seconds": {side: spread(one) for side, one in result["losses"].items()},
    }


def measure(section: str, *, rounds: int, mebibytes: int) -> dict[str, Any]:
    """One section in a process of its own."""
    with scratch() as directory:
        program = PROGRAMS / "checkpoint_sides.py"
        command: list[Any] = [PYTHON, program, section, str(rounds), str(mebibytes), directory]
        done = subprocess.run(
            command,
            env=fair_environment(),
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise SideFailed(f"{section} ended with {done.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
