"""`seek_ms` and `data_state_bytes`: how long the first batch after a seek takes at 10^9 samples, and what a run must remember of its data.

The token file is sparse: 10^9 rows without their bytes on disk, read through the same maps and the same order as any other. Used by
`python -m benchmarks train`; alone: `python -m benchmarks.dataseek`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

from argosy.data.feeds import Feed
from argosy.data.mixtures import Mixture
from argosy.data.tokens import Tokens
from benchmarks.measure import scratch

SAMPLES = 10**9
LENGTH = 16
SEEKS = 200


def measure(seeks: int = SEEKS) -> dict[str, Any]:
    """Medians over seeks to random places; every seek is to another epoch or block, so nothing is in a cache."""
    with scratch() as folder:
        tokens = Tokens(_sparse(folder / "large.bin"), "uint16", sequence_length=LENGTH)
        assert tokens.num_samples == SAMPLES
        one = tokens.feed(batch_size=32, lanes=8, seed=0)
        weights = {0: {"a": 3, "b": 1}, 10**6: {"a": 1, "b": 1}, 10**7: {"b": 1}}
        sources = {
            "a": Tokens(folder / "large.bin", "uint16"),
            "b": Tokens(folder / "large.bin", "uint16"),
        }
        mixed = Mixture(sources, weights=weights, sequence_length=LENGTH).feed(32, 8, 0)
        single, mixture = _seek(one, seeks), _seek(mixed, seeks)
        state = max(len(json.dumps(feed.describe()).encode()) for feed in (one, mixed))
    return {
        "seek_ms": max(single[0], mixture[0]),
        "seek_ms_single": single[0],
        "seek_ms_mixture": mixture[0],
        "seek_ms_p95": max(single[1], mixture[1]),
        "data_state_bytes": state,
    }


def _sparse(path: Path) -> Path:
    with open(path, "wb") as file:
        os.truncate(file.fileno(), (SAMPLES * LENGTH + 1) * 2)
    return path


def _seek(feed: Feed, seeks: int) -> tuple[float, float]:
    """Median and 95th percentile in milliseconds."""
    places = random.Random(7)
    took = []
    for _ in range(seeks):
        index = places.randrange(3 * SAMPLES // feed.batch_size)
        lane = places.randrange(feed.lanes)
        began = time.perf_counter()
        feed.batch(index, lane)
        took.append((time.perf_counter() - began) * 1e3)
    took.sort()
    return round(statistics.median(took), 4), round(took[int(len(took) * 0.95)], 4)


if __name__ == "__main__":
    print(json.dumps(measure()))
