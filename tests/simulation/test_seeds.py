from __future__ import annotations

import json

import pytest

from argosy.testing.campaign import main


def _metrics(capsys, *arguments):
    code = main(["--nice", "0", *arguments])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_thirty_stories_of_two_hundred_hosts_break_nothing(capsys):
    code, metrics = _metrics(capsys, "--seeds", "0-29", "--runs", "30")
    assert code == 0
    assert (metrics["seeds"], metrics["hosts"], metrics["broken_invariants"]) == (30, 200, 0)
    assert metrics["least_events"] >= 5000
    assert metrics["least_faults"] >= 20


@pytest.mark.timeout(120)
def test_a_seed_has_the_same_history_every_time(capsys):
    code, metrics = _metrics(capsys, "--seeds", "50-51", "--trainings", "1", "--twice")
    assert code == 0
    assert metrics["histories_compared"] == 4
