"""What both benchmarks need: the same conditions for every side, waiting with a deadline, medians, and progress.

Nothing here knows a launcher. A measured time always comes from clocks of this host, read by the program under
measurement itself and compared with a reading taken before it was started.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(__file__).resolve().parent / "programs"
PYTHON = ROOT / ".venv" / "bin" / "python"

# Mends of the machine that all sides get alike (docs/reference/benchmarks.md says why).
FAIR = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RES_OPTIONS": "timeout:1 attempts:1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

T = TypeVar("T")


class SideFailed(Exception):
    """One side did not do its work; its numbers are then null, with this as the reason."""


def fair_environment(**more: str) -> dict[str, str]:
    """This process's environment without traces of a launcher, with the common mends."""
    foreign = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
        "TORCHELASTIC_",
        "ARGOSY_",
        "RAY_",
        "GROUP_",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | FAIR | more


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory of this measurement's own, gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="argosy-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def wait_until(
    what: str, condition: Callable[[], T], *, timeout_seconds: float = 60.0, every: float = 0.01
) -> T:
    """Wait for a condition that gives something true, and return that."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise SideFailed(f"waited {timeout_seconds:g} s in vain for {what}")
        time.sleep(every)


def settle(*, idle_share: float = 0.8, timeout_seconds: float = 10.0) -> None:
    """Wait until the machine is mostly idle: what one side does after its round must not burden the next side's."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        idle, total = _cpu_ticks()
        time.sleep(0.5)
        idle_now, total_now = _cpu_ticks()
        if idle_now - idle >= idle_share * (total_now - total):
            return


def _cpu_ticks() -> tuple[int, int]:
    """(idle, all) ticks of all CPUs since boot."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def ranks_done(directory: Path, count: int, *, timeout_seconds: float = 120.0) -> int:
    """Wait for the files of first_allreduce.py, check every rank's sum, return when the last one was done (ns)."""
    names = [directory / f"rank{rank}.json" for rank in range(count)]
    wait_until(
        f"{count} ranks in {directory}",
        lambda: all(name.exists() for name in names),
        timeout_seconds=timeout_seconds,
    )
    records: list[dict[str, Any]] = [json.loads(name.read_text()) for name in names]
    expected = count * (count + 1) / 2
    wrong = [r for r in records if r["total"] != expected or r["world_size"] != count]
    if wrong:
        raise SideFailed(f"the all-reduce of {count} ranks must give {expected}: {wrong[0]}")
    return int(max(record["done_ns"] for record in records))


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def percentile(values: list[float], q: float) -> float | None:
    """The smallest value that at least the share q of all values does not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)


def spread(values: list[float]) -> list[float]:
    """Smallest, median, largest: what a reader needs to judge a median."""
    if not values:
        return []
    return [round(v, 4) for v in (min(values), statistics.median(values), max(values))]


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
