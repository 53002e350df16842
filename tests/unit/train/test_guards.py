"""Verdicts of the guard: the same numbers give the same verdict everywhere."""

import math

import pytest

from argosy.errors import ConfigError
from argosy.train.guards import Guard, Watch


def test_finite_steps_go():
    assert Watch(Guard()).judge(2.0, 1.0, attempt=0, skips=0) == "go"


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_what_is_not_finite_is_computed_again_and_then_left_to_the_policy(loss, norm):
    watch = Watch(Guard(policy="skip"))
    assert watch.judge(loss, norm, attempt=0, skips=0) == "again"
    assert watch.judge(loss, norm, attempt=1, skips=0) == "skip"


def test_too_many_skips_stop():
    assert Watch(Guard(most_skips=3)).judge(math.nan, 1.0, attempt=1, skips=3) == "stop"


def test_a_spike_is_judged_by_the_losses_of_the_ledger():
    watch = Watch(Guard(spike=8.0, window=8))
    watch.recall([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0])
    assert watch.judge(50.0, 1.0, attempt=0, skips=0) == "go"  # too few to tell
    watch.recall([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.02])
    assert watch.judge(50.0, 1.0, attempt=0, skips=0) == "skip"
    assert watch.judge(1.2, 1.0, attempt=0, skips=0) == "go"


@pytest.mark.parametrize("given", [{"policy": "ignore"}, {"window": 5000}, {"spike": 0.0}])
def test_what_makes_no_sense_or_would_not_fit_is_refused(given):
    with pytest.raises(ConfigError):
        Guard(**given)
