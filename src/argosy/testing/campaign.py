"""Campaign: `python -m argosy.testing --seeds 0-1999` simulates many seeds on all cores and prints JSON at the end.

Each seed is a story of a cluster and `--trainings` stories of training runs on a small one. Exits with 1 at the first broken invariant, with its
seed and story. `--twice` runs each seed a second time and compares the histories.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from typing import Any

from argosy.errors import InvariantError
from argosy.testing.cluster import simulate
from argosy.testing.trainingstories import simulate_training

Job = tuple[str, int, int, int, int]
"""Kind of story, seed, hosts, runs, faults."""
_COUNTED = (
    "num_events",
    "num_facts",
    "num_faults",
    "num_checks",
    "num_messages",
    "num_commits",
    "num_accusations",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; the exit code."""
    options = _parse(arguments)
    first, last = options.seeds
    seeds = range(first, last + 1)
    jobs: list[Job] = [
        ("cluster", seed, options.hosts, options.runs, options.faults) for seed in seeds
    ]
    many = options.trainings
    jobs += [("training", seed * many + n, 2, 2, 6) for seed in seeds for n in range(many)]
    if options.twice:
        jobs += jobs
    os.nice(options.nice)
    began = time.monotonic()
    totals = dict.fromkeys(_COUNTED, 0)
    least = {"num_events": 1 << 60, "num_faults": 1 << 60}
    digests: dict[tuple[str, int], str] = {}
    compared = 0
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for done, result in enumerate(pool.imap(_one, jobs), start=1):
            story = result["kind"], result["seed"]
            if "broken" in result:
                print(f"{story[0]} seed {story[1]}: {result['broken']}", file=sys.stderr)
                return _finish({"kind": story[0], "seed": story[1], "broken_invariants": 1})
            compared += story in digests
            if digests.setdefault(story, result["digest"]) != result["digest"]:
                print(f"{story}: its second history differs from its first", file=sys.stderr)
                return _finish({"kind": story[0], "seed": story[1], "broken_invariants": 1})
            for key in totals:
                totals[key] += result.get(key, 0)
            for key in least if story[0] == "cluster" else ():
                least[key] = min(least[key], result[key])
            if done % 50 == 0 or done == len(jobs):
                _say(done, len(jobs), totals, time.monotonic() - began)
    seconds = time.monotonic() - began
    answer: dict[str, Any] = {
        "seeds": len(seeds),
        "trainings": len(seeds) * many,
        "hosts": options.hosts,
        "broken_invariants": 0,
        "histories_compared": compared,
        "replays_compared": sum(job[0] == "cluster" for job in jobs),
        "least_events": least["num_events"],
        "least_faults": least["num_faults"],
        **totals,
        "seconds": round(seconds, 1),
        "seconds_per_seed": round(seconds / len(jobs), 3),
    }
    return _finish(answer)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m argosy.testing", description=__doc__)
    parser.add_argument("--seeds", type=_range, default=(0, 1999), help="first-last")
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--runs", type=int, default=70)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument(
        "--trainings", type=int, default=4, help="stories of training for each seed"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--twice", action="store_true", help="run each seed again and compare")
    return parser.parse_args(arguments)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    found = int(first), int(last or first)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text} has no seeds: say the smaller number first")
    return found


def _one(job: Job) -> dict[str, Any]:
    kind, seed, hosts, runs, faults = job
    simulated = simulate if kind == "cluster" else simulate_training
    try:
        result = simulated(seed, num_hosts=hosts, num_runs=runs, num_faults=faults)
    except InvariantError as error:
        result = {"seed": seed, "broken": str(error)}
    return {**result, "kind": kind}


def _say(done: int, total: int, totals: dict[str, int], seconds: float) -> None:
    text = f"{done}/{total} simulations, {totals['num_events']:,} events, {totals['num_faults']} faults"
    print(f"{text}, {seconds:.0f} s", file=sys.stderr, flush=True)


def _finish(answer: dict[str, Any]) -> int:
    print(json.dumps({"bench": "simulator", "metrics": answer}))
    return 1 if answer["broken_invariants"] else 0
