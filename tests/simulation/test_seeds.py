from __future__ import annotations

import multiprocessing
import os

import pytest

from argosy.testing.cluster import simulate

NUM_SEEDS = 50


def _outcome(seed):
    result = simulate(seed)
    again = simulate(seed)["digest"] if seed % 10 == 0 else result["digest"]
    return result, again


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fifty_stories_of_two_hundred_hosts_break_nothing_and_repeat_exactly():
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for result, again in pool.imap(_outcome, range(NUM_SEEDS)):
            assert result["num_events"] >= 5000
            assert result["num_faults"] >= 20
            assert result["num_facts"] >= 1000
            assert result["digest"] == again
