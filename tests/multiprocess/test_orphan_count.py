"""The benchmark's count of orphans must be able to find one: a family that no cluster owns, its leader killed."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from benchmarks.measure import PROGRAMS
from benchmarks.orphans import Campaign, start_time

pytestmark = pytest.mark.multiprocess


class ClusterThatOwns:
    def __init__(self, *attempts):
        self.attempts = attempts

    def processes(self):
        return [{"attempt": attempt, "state": "running"} for attempt in self.attempts]


@pytest.fixture
def family(tmp_path):
    environment = os.environ | {"ARGOSY_ATTEMPT": "ghost", "BENCH_DIR": str(tmp_path)}
    leader = subprocess.Popen([sys.executable, "-S", str(PROGRAMS / "family.py")], env=environment)
    record = tmp_path / f"family.{leader.pid}"
    deadline = time.monotonic() + 30
    while not record.exists():
        assert leader.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    members = [
        (int(pid), int(start))
        for pid, start in (line.split() for line in record.read_text().splitlines()[1:])
    ]
    yield leader, members
    leader.kill()
    leader.wait()
    for pid, start in members:
        if start_time(pid) == start:
            os.kill(pid, signal.SIGKILL)


class TakeFirst:
    """In place of a random source: the victim is the leader, the first pid of the list that it is given."""

    def __init__(self, pid):
        self.pid = pid

    def choice(self, pids):
        assert self.pid in pids
        return self.pid


def test_descendants_of_a_killed_leader_that_nobody_owns_are_orphans(family, tmp_path):
    leader, members = family
    assert len(members) == 4
    campaign = Campaign(ClusterThatOwns(), tmp_path)
    campaign.kill("user", TakeFirst(leader.pid))
    leader.wait(10)
    assert len(campaign.orphans) == 3
    assert psutil.pid_exists(members[3][0]), "the daemon outlives its leader"


def test_members_of_a_live_attempt_are_no_orphans(family, tmp_path):
    leader, _ = family
    campaign = Campaign(ClusterThatOwns("ghost"), tmp_path)
    campaign.kill("user", TakeFirst(leader.pid))
    assert campaign.orphans == []
