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
    """Says which attempts are live now, and has one page of events."""

    def __init__(self, *attempts, events=()):
        self.attempts = attempts
        self.events = list(events)

    def get(self, path):
        page, self.events = self.events, []
        return {"events": page}

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


def exited(seconds_from_now, **more):
    fact = {"kind": "attempt.exited", "attempt": "ghost"} | more
    return {"seq": 1, "at": time.time() + seconds_from_now, "fact": fact}


def test_an_attempt_that_ended_after_the_look_was_live_at_the_look(family, tmp_path):
    leader, _ = family
    campaign = Campaign(ClusterThatOwns(events=[exited(3600)]), tmp_path)
    campaign.kill("user", TakeFirst(leader.pid))
    assert campaign.orphans == []


@pytest.mark.parametrize("event", [exited(-3600), exited(3600, lost=True)], ids=["ended", "lost"])
def test_an_attempt_that_ended_before_or_was_lost_with_its_keeper_excuses_nobody(
    family, tmp_path, event
):
    leader, _ = family
    campaign = Campaign(ClusterThatOwns(events=[event]), tmp_path)
    campaign.kill("user", TakeFirst(leader.pid))
    assert len(campaign.orphans) == 3
