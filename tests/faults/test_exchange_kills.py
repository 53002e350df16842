"""Ranks of an exchange are killed at random points: survivors are told, finish with the same bits, and nothing is left."""

import os
import random
import time

import pytest
import torch
from benchmarks import exchangekills, kills
from benchmarks.exchangeranks import Gang, Job, reference

pytestmark = [pytest.mark.faults, pytest.mark.multiprocess]

SEED = int(os.environ.get("ARGOSY_SEED", "20260"))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_survivors_finish_with_the_bits_of_an_undisturbed_run():
    """Three ranks, two of them killed for good one after the other: the last one computes all lanes."""
    chance = random.Random(SEED)
    digests = reference(5, 12)
    job = Job(f"survivors-{SEED}", lanes=5, ranks=3)
    gang = Gang(job, 3, target=12)
    try:
        for victim in chance.sample(range(3), 2):
            gang.wait_version(job.exchange.state.current()[0] + 1)
            time.sleep(chance.random() * 0.004)
            gang.kill(victim, replace=False)
            gang.announce()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in gang.pids.values()]
        gang.pids.clear()
        assert codes == [0]
        version, slot = job.exchange.state.current()
        assert version == 12
        assert job.digest(slot) == digests[12]
        assert job.exchange.state.unrefreshed(12) == []
    finally:
        gang.close()
        job.close()


def test_kills_at_random_points_give_typed_errors_and_no_torn_version():
    found = exchangekills.measure(12, seed=SEED)
    assert found["exchange_typed_errors_within_1s"] == found["exchange_peer_kill_trials"] == 12
    assert found["exchange_versions_checked"] >= 12
    assert found["exchange_torn_versions_seen"] == 0
    assert found["exchange_leaks"] == 0
    assert kills.totals(found | {"collectives_peer_kill_trials": 3, "collectives_leaks": 1}) == {
        "peer_kill_trials": 15,
        "typed_errors_within_1s": 12,
        "torn_versions_seen": 0,
        "leaks": 1,
    }
