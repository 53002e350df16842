"""Commands that ask whether a process is ready: they run beside it, under its limits, and nothing of them is left."""

import os
import signal
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.faults]
DEADLINE_SECONDS = 60.0


def wait_until(condition, what):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return value


def is_alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(path):
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def test_nothing_that_a_probe_leaves_running_outlives_its_run(cluster, tmp_path):
    place = tmp_path / "pids"
    ask = f"setsid sh -c 'echo $$ >> {place}; exec sleep 1000' & echo $$ >> {place}; exit 1"
    role = {
        "command": ["sleep", "1000"],
        "ready": {"command": ["sh", "-c", ask], "every_seconds": 0.02},
    }
    run = cluster.submit({"main": role})
    wait_until(lambda: len(pids_in(place)) >= 4, "it was asked twice")
    cluster.post(f"/v1/runs/{run}/stop", {"hard": False, "reason": "test"})
    assert cluster.wait_ended(run)["outcome"] == "stopped"
    assert [pid for pid in pids_in(place) if is_alive(pid)] == []


def test_a_probe_runs_beside_its_process_in_its_environment_and_under_its_limits(cluster, tmp_path):
    look = (
        '{ cat /proc/self/cgroup; nice; ulimit -n; } > "$WHERE/$0.part"; '
        'mv "$WHERE/$0.part" "$WHERE/$0"'
    )
    role = {
        "command": ["sh", "-c", f"{look}; exec sleep 1000", "process"],
        "env": {"WHERE": str(tmp_path)},
        "nice": 3,
        "ready": {"command": ["sh", "-c", look, "probe"], "every_seconds": 0.02},
    }
    run = cluster.submit({"main": role})
    cluster.wait_state(run, "ready")
    # The one that is asked about may come to it later than the one that asks.
    wait_until((tmp_path / "process").exists, "the process has looked")
    assert (tmp_path / "probe").read_text() == (tmp_path / "process").read_text()
    assert "\n3\n" in (tmp_path / "probe").read_text()


def test_a_new_agent_ends_the_probe_of_the_one_before_and_asks_again(cluster, tmp_path):
    place, flag = tmp_path / "pids", tmp_path / "flag"
    ask = f"echo $$ >> {place}; test -e {flag} || exec sleep 1000"
    role = {
        "command": ["sleep", "1000"],
        "ready": {"command": ["sh", "-c", ask], "every_seconds": 0.02},
    }
    run = cluster.submit({"main": role})
    wait_until(lambda: pids_in(place), "it was asked")
    flag.touch()
    os.kill(cluster.pids()["agent"], signal.SIGKILL)
    cluster.wait_state(run, "ready")
    first = pids_in(place)[0]
    wait_until(lambda: not is_alive(first), "the first command has been ended")
