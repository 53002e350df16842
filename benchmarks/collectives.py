"""`collectives`: the argosy backend beside Gloo in the same processes, in turns; both are checked for correctness before they are timed.

Each section stands alone: one that fails gives null for its metrics and says why, the others still run.
"""

from __future__ import annotations

import json
import socket
import subprocess
from typing import Any

from benchmarks import kills
from benchmarks.measure import PROGRAMS, PYTHON, SideFailed, fair_environment, rounded, say, settle

RANKS_SECONDS = 600.0


def run(*, quick: bool) -> dict[str, Any]:
    """Measure everything and return the metrics."""
    metrics: dict[str, Any] = {}
    sections = (
        ("2 ranks", lambda: sizes(2, quick, "")),
        ("4 ranks", lambda: sizes(4, quick, "_4ranks")),
        ("fallback", lambda: fallback(quick)),
        ("ddp", lambda: ddp(quick)),
        ("fsdp", lambda: fsdp(quick)),
        ("kills", lambda: kills.measure(quick=quick)),
    )
    for name, section in sections:
        settle()
        say(f"collectives: {name}")
        try:
            found = section()
        except (SideFailed, subprocess.TimeoutExpired) as failure:
            say(f"collectives: {name} failed: {failure}")
            found = {f"{name.replace(' ', '_')}_failed": str(failure)[-500:]}
        metrics |= found
    return metrics


def sizes(num_ranks: int, quick: bool, suffix: str) -> dict[str, Any]:
    found = ranks("sizes", num_ranks, quick)
    metrics: dict[str, Any] = {}
    for name, sides in found.items():
        metrics[f"{name}_speedup_over_gloo{suffix}"] = rounded(sides["speedup"], 2)
        metrics[f"{name}_us{suffix}"] = [rounded(sides[side], 1) for side in ("argosy", "gloo")]
        say(
            f"{name}{suffix}: {sides['argosy']:.0f} us, Gloo {sides['gloo']:.0f} us, x {sides['speedup']:.2f}"
        )
    return metrics


def fallback(quick: bool) -> dict[str, Any]:
    """Without native code, over all operations; sizes below 1 MiB must only not be slower."""
    large, all_sizes, slowest = [], [], ""
    for num_ranks in (2, 4):
        for name, sides in ranks("fallback", num_ranks, quick, ARGOSY_NATIVE="0").items():
            say(f"fallback, {num_ranks} ranks, {name}: x {sides['speedup']:.2f}")
            all_sizes.append((sides["speedup"], f"{name} at {num_ranks} ranks"))
            if name.endswith("MiB"):
                large.append(sides["speedup"])
    slowest = min(all_sizes)[1]
    return {
        "fallback_min_speedup_over_gloo": rounded(min(large), 2),
        "fallback_min_speedup_at_any_size": rounded(min(all_sizes)[0], 2),
        "fallback_slowest": slowest,
    }


def ddp(quick: bool) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for num_ranks, suffix in ((2, ""), (4, "_4ranks")):
        found = ranks("ddp", num_ranks, quick)
        metrics[f"ddp_step_speedup_over_gloo{suffix}"] = rounded(found["speedup"], 3)
        metrics[f"ddp_step_seconds{suffix}"] = [rounded(found[side]) for side in ("argosy", "gloo")]
        metrics[f"ddp_bits_equal{suffix}"] = found["equal"]
    return metrics


def fsdp(quick: bool) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for num_ranks, suffix in ((2, ""), (4, "_4ranks")):
        found = ranks("fsdp", num_ranks, quick)
        metrics[f"fsdp2_step_speedup_over_gloo{suffix}"] = rounded(found["speedup"], 3)
        metrics[f"fsdp2_step_speedup_without_fast_path{suffix}"] = rounded(
            found["plain_speedup"], 3
        )
        metrics[f"fsdp2_step_seconds{suffix}"] = [
            rounded(found[side]) for side in ("fast", "argosy", "gloo")
        ]
        # Four numbers have many sums: Gloo adds in an order of its own, so only two ranks can agree in every bit.
        metrics[f"fsdp2_bits_equal{suffix}"] = found["equal"]
        metrics[f"fsdp2_fast_path_bits_equal{suffix}"] = found["fast_equal"]
    return metrics


def ranks(task: str, num_ranks: int, quick: bool, **more: str) -> dict[str, Any]:
    """Start the ranks of one task and return what rank 0 found."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = fair_environment(**more) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "PYTHONWARNINGS": "ignore",
    }
    command = [str(PYTHON), str(PROGRAMS / "collective_ranks.py"), task, str(int(quick))]
    started = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        output, errors = started[0].communicate(timeout=RANKS_SECONDS)
    finally:
        for process in started:
            if process.poll() is None:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if started[0].returncode != 0 or not output.strip():
        raise SideFailed(f"{task} with {num_ranks} ranks: {errors[-500:]}")
    return dict(json.loads(output.splitlines()[-1]))
