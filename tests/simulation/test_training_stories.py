"""Training runs on a simulated cluster: the real deciders of train/ and worker/ under deaths, hangs, exceptions, bad numbers, resizes and crashes of the runtime."""

from __future__ import annotations

import subprocess
import sys

import pytest

from argosy.errors import InvariantError
from argosy.move import rounds
from argosy.testing.trainingstories import TrainingStory, simulate_training
from argosy.train import guards, ledgers, memberships, recovery, shares


def test_twenty_stories_break_nothing():
    results = [simulate_training(seed) for seed in range(20)]
    assert sum(result["num_commits"] for result in results) > 200
    assert sum(result["num_accusations"] for result in results) > 20
    assert sum(result["num_left_out"] for result in results) > 5
    assert sum(result["num_resizes"] for result in results) > 5


def test_a_member_that_is_stopped_is_ended_though_its_rank_was_given_away_for_many_generations():
    simulate_training(20992)


def test_what_was_trained_is_saved_when_a_run_is_stopped_while_nobody_is_alive():
    results = [simulate_training(seed, num_faults=2, kills_and_stops=True) for seed in range(12)]
    assert sum(result["num_saved"] for result in results) >= 10
    assert sum(result["num_unsaved"] for result in results) == 0


def test_the_same_seed_tells_the_same_story():
    assert simulate_training(3) == simulate_training(3)


def test_the_simulator_needs_no_torch():
    code = "import argosy.testing.campaign, sys; raise SystemExit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _breaks(seeds):
    for seed in seeds:
        try:
            simulate_training(seed, most_seconds=2000.0)
        except (InvariantError, KeyError):
            return True
    return False


def _all_but_the_last(position, count, num_lanes):
    return range(position, num_lanes - 1, count)


def _one_early(world_size, has_enlisted, gone):
    return sum(has_enlisted(rank) or rank in gone for rank in range(world_size)) >= world_size - 1


MUTANTS = {
    "a lane that nobody computes": (shares, "dealt_lanes", _all_but_the_last),
    "a suspect that is well": (recovery, "accuse", lambda waited, *rest: "late" * (waited > 1.0)),
    "an exception that ends the run at once": (recovery, "judge_failure", lambda **_: "fail"),
    "numbers that are not finite": (guards.Watch, "judge", lambda *_, **__: "go"),
    "a batch that comes twice": (guards, "batch_of_step", lambda step, omitted: step),
    "a generation taken before all are ready": (memberships, "is_complete", _one_early),
    "a state that is not handed on": (ledgers, "is_of_loop", lambda before, turn: True),
    "a membership entered before all are in it": (rounds, "entry", lambda words, _: "all"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_decider_that_allows_this_would_be_noticed(what, monkeypatch):
    place, name, mutant = MUTANTS[what]
    monkeypatch.setattr(place, name, mutant)
    assert _breaks(range(24))


def test_a_run_that_is_stopped_when_its_loop_is_over_has_saved_or_says_that_it_has_not():
    num_stopped = 0
    for seed in range(10):
        story = TrainingStory(seed, num_runs=1)
        clock = story.cluster.clock
        while not story.is_over() or not story.runs:
            clock.run_until(clock.now + 0.01)
            story.kill_lonely()
            for run in story.runs.values():
                if int(run.memory.committed.ledger["step"]) == run.plan.num_steps:
                    story.stop()
        num_stopped += sum(run.wish == "cancelled" for run in story.runs.values())
    assert num_stopped >= 5
