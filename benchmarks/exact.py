"""`exact`: are the bits the same for every number of ranks, through live resizes and through faults?

XS for 200 steps and S for 20, at 1, 2, 3, 4 and 8 ranks; random schedules of resizes; random faults at random instants (faults.py). Everything is
compared with one undisturbed run. `make campaign` runs the long form; a seed repeats its choices, not its timing.
"""

from __future__ import annotations

import collections
import random
import subprocess
from collections.abc import Callable
from typing import Any

from benchmarks.faults import KINDS, STEPS, Reference, Trial, one_trial
from benchmarks.measure import SideFailed, percentile, rounded, say, scratch, settle
from benchmarks.ours import Cluster
from benchmarks.recorded import Recorded, losses_by_step, read_commits, run_alone
from benchmarks.tokenfile import write_tokens

WORLDS = (1, 2, 3, 4, 8)
RESIZES = (4, 2, 3, 8)
SEED = 7
# Slow enough for three changes of ranks, each of which starts processes.
PACED_STEPS = 200
PACE_SECONDS = 0.03


def run(
    *, quick: bool, trials: int | None = None, only: str = "", seed: int | None = None
) -> dict[str, Any]:
    """All sections, or those named in `only`: worlds_xs, worlds_s, resizes, schedules, faults or kinds of faults. `trials` is the number of fault trials."""
    seed = SEED if seed is None else seed
    kinds = tuple(kind for kind in KINDS if kind in only.split(",")) or KINDS
    metrics: dict[str, Any] = {"seed": seed}
    notes: dict[str, str] = {}
    with scratch() as directory:
        tokens = str(write_tokens(directory))
        xs = {"BENCH_SIZE": "XS", "BENCH_TOKENS": tokens}
        s = {"BENCH_SIZE": "S", "BENCH_TOKENS": tokens}
        sections: dict[str, Callable[[], dict[str, Any]]] = {
            "worlds_xs": lambda: worlds("XS", xs, 40 if quick else 200),
            "worlds_s": lambda: worlds("S", s, 3 if quick else 20),
            "resizes": lambda: resizes(xs, PACED_STEPS),
            "schedules": lambda: schedules(xs, 2 if quick else 30, seed),
            "faults": lambda: faults(xs, kinds, trials or (len(kinds) if quick else 200), seed),
        }
        for name, section in sections.items():
            is_kind = name == "faults" and kinds != KINDS
            if only and name not in only.split(",") and not is_kind:
                continue
            settle()
            say(f"exact: {name}")
            try:
                metrics |= section()
            except (SideFailed, subprocess.TimeoutExpired, OSError) as failure:
                say(f"exact: {name} failed: {failure}")
                notes[name] = str(failure)[-600:]
                metrics |= dict.fromkeys(GIVES[name])
    parts = [metrics.get(name) for name in ("worlds_xs_equal", "worlds_s_equal", "resizes_equal")]
    metrics["hash_equal_worlds"] = None if None in parts else all(parts)
    if notes:
        metrics["notes"] = notes
    return metrics


def worlds(size: str, task: dict[str, str], steps: int) -> dict[str, Any]:
    """The same run at every number of ranks."""
    digests = {}
    for ranks in WORLDS:
        with scratch() as out:
            digests[ranks] = run_alone(out, ranks, BENCH_STEPS=str(steps), **task)
        say(f"{size}, {steps} steps, {ranks} ranks: {digests[ranks][:16]}")
    return {
        f"worlds_{size.lower()}_equal": len(set(digests.values())) == 1,
        f"worlds_{size.lower()}_steps": steps,
    }


def resizes(task: dict[str, str], steps: int) -> dict[str, Any]:
    """One run that is resized 4 -> 2 -> 3 -> 8 while it trains."""
    expected = undisturbed(task, steps).digest
    with scratch() as directory, Cluster(directory) as cluster:
        plan = [(10, ranks) for ranks in RESIZES[1:]]
        found = resized(cluster, task, steps, RESIZES[0], plan)
    say(f"resized {RESIZES}: {found[:16]}, undisturbed {expected[:16]}")
    return {"resizes_equal": found == expected}


def schedules(task: dict[str, str], count: int, seed: int) -> dict[str, Any]:
    """Random worlds to begin with, resized at random steps."""
    steps = PACED_STEPS
    expected = undisturbed(task, steps).digest
    equal = 0
    with scratch() as directory, Cluster(directory) as cluster:
        for number in range(count):
            chance = random.Random(f"{seed}/schedule/{number}")
            first, *others = chance.sample(WORLDS, chance.randint(2, 4))
            plan = [(chance.randint(1, 20), ranks) for ranks in others]
            found = resized(cluster, task, steps, first, plan)
            equal += found == expected
            verdict = "equal" if found == expected else f"DIFFERENT {found[:16]}"
            say(f"schedule {number + 1}/{count}: {first} then {plan}: {verdict}")
    return {"schedules": count, "schedules_equal": equal}


def resized(
    cluster: Cluster, task: dict[str, str], steps: int, first: int, plan: list[tuple[int, int]]
) -> str:
    """The digest of a run whose number of ranks is changed so many steps after it was first seen with the ranks before."""
    with scratch() as out:
        cluster.up()
        recorded = Recorded(
            cluster, out, first, BENCH_STEPS=str(steps), BENCH_PACE=str(PACE_SECONDS), **task
        )
        try:
            seen = recorded.wait_world(first)
            for after, ranks in plan:
                recorded.wait_step(seen + after)
                cluster.command("scale", recorded.run, str(ranks))
                seen = recorded.wait_world(ranks)
            outcome = recorded.wait_end(timeout_seconds=180.0)
            if outcome != "succeeded":
                raise SideFailed(f"a resized run ended as {outcome}; {cluster.log_tail()}")
            return recorded.digest()
        finally:
            recorded.stop()


def faults(task: dict[str, str], kinds: tuple[str, ...], trials: int, seed: int) -> dict[str, Any]:
    """Random faults at random instants, each kind as often as every other."""
    reference = undisturbed(task, STEPS)
    done: list[Trial] = []
    with scratch() as directory, Cluster(directory) as cluster:
        for number in range(trials):
            chance = random.Random(f"{seed}/fault/{number}")
            with scratch() as out:
                kind = kinds[number % len(kinds)]
                trial = one_trial(cluster, out, chance, kind, reference, task)
            done.append(trial)
            is_good = trial.is_finished and trial.is_hash_equal and not trial.samples_wrong
            if not is_good or trial.steps_lost:
                say(f"trial {number} (seed {seed}/fault/{number}): {trial}")
            if (number + 1) % 10 == 0:
                say(f"{number + 1}/{trials} faults, {sum(t.is_hash_equal for t in done)} equal")
    return summary(done)


def summary(trials: list[Trial]) -> dict[str, Any]:
    bad = collections.Counter(
        trial.kind for trial in trials if not (trial.is_finished and trial.is_hash_equal)
    )
    return {
        "fault_trials": len(trials),
        "finished": sum(trial.is_finished for trial in trials),
        "hash_equal": sum(trial.is_hash_equal for trial in trials),
        "steps_lost": sum(trial.steps_lost for trial in trials),
        "samples_lost_or_repeated": sum(trial.samples_wrong for trial in trials),
        "fault_trial_seconds_p50": rounded(percentile([t.seconds for t in trials], 0.5), 2),
        "fault_kinds": dict(collections.Counter(trial.kind for trial in trials)),
        "fault_kinds_bad": dict(bad),
        "fault_why": sorted({f"{t.kind}: {t.why}" for t in trials if t.why})[:20],
    }


def undisturbed(task: dict[str, str], steps: int) -> Reference:
    """One rank, no cluster, no faults."""
    with scratch() as out:
        digest = run_alone(out, 1, BENCH_STEPS=str(steps), **task)
        commits = [commit for path in out.glob("*.steps") for commit in read_commits(path)]
        return Reference(digest, losses_by_step(commits))


GIVES = {
    "worlds_xs": ("worlds_xs_equal",),
    "worlds_s": ("worlds_s_equal",),
    "resizes": ("resizes_equal",),
    "schedules": ("schedules", "schedules_equal"),
    "faults": ("fault_trials", "finished", "hash_equal", "steps_lost", "samples_lost_or_repeated"),
}
