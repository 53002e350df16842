"""Agent, controller and keeper of a real cluster are killed: nothing of a run dies that need not, and all come back."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from argosy.control.submission import bring_up

pytestmark = [pytest.mark.multiprocess, pytest.mark.faults]
DEADLINE_SECONDS = 60.0
IDLE_SECONDS = 1.0


@pytest.fixture
def idle_cluster(request, monkeypatch):
    monkeypatch.setenv("ARGOSY_IDLE_SECONDS", str(IDLE_SECONDS))
    return request.getfixturevalue("cluster")


def wait_until(condition, what):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return value


def is_alive(pid):
    """A zombie that nobody has reaped yet is dead."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_and_wait(cluster, *parts):
    """Kill parts with -9 and wait until all of the cluster is back."""
    before = cluster.pids()
    for part in parts:
        os.kill(before[part], signal.SIGKILL)

    def is_back():
        now = cluster.pids()
        return set(now) == {"controller", "agent", "keeper"} and all(
            now[part] != before[part] for part in parts
        )

    wait_until(is_back, f"{parts} are back")


def exits_and_starts(cluster, run):
    facts = cluster.facts(run)
    return Counter(
        (fact["kind"], fact["attempt"])
        for fact in facts
        if fact["kind"] in ("attempt.started", "attempt.exited")
    )


@pytest.mark.parametrize("parts", [("agent",), ("controller",), ("agent", "controller")])
def test_processes_outlive_the_death_of_agent_and_controller(cluster, parts):
    script = "while :; do sleep 0.05; echo tick; done"
    run = cluster.submit({"main": {"command": ["sh", "-c", script], "count": 3}})
    before = {p["attempt"]: p["pid"] for p in cluster.wait_state(run, "running")}
    for _ in range(2):
        kill_and_wait(cluster, *parts)
    after = {p["attempt"]: p["pid"] for p in cluster.wait_state(run, "running")}
    assert after == before
    seen = len(cluster.lines(run, index=0))
    wait_until(lambda: len(cluster.lines(run, index=0)) > seen, "output goes on")
    cluster.post(f"/v1/runs/{run}/stop", {})
    cluster.wait_ended(run)
    assert set(exits_and_starts(cluster, run).values()) == {1}


def test_what_ends_while_nobody_looks_is_in_the_log_once(cluster, tmp_path, halt):
    gate = tmp_path / "gate"
    script = f"while [ ! -e {gate} ]; do sleep 0.02; done; exit 5"
    run = cluster.submit({"main": {"command": ["sh", "-c", script]}})
    cluster.wait_state(run, "running")
    pids = cluster.pids()
    halt(pids["agent"])
    os.kill(pids["controller"], signal.SIGKILL)
    gate.touch()
    os.kill(pids["agent"], signal.SIGKILL)
    view = cluster.wait_ended(run)
    assert view["exit_code"] == 5
    assert set(exits_and_starts(cluster, run).values()) == {1}


def test_a_dead_keeper_is_replaced_and_restarts_happen_in_the_same_environment(cluster, tmp_path):
    out = tmp_path / "values"
    script = f'echo "$VALUE $OWN" >> {out}; (setsid sleep 1000 &) ; sleep 1000'
    role = {"command": ["sh", "-c", script], "restart": "permanent", "env": {"OWN": "too"}}
    run = cluster.submit({"main": role}, env={**os.environ, "VALUE": "kept"}, service=True)
    (first,) = cluster.wait_state(run, "running")
    wait_until(lambda: out.exists() and out.read_text() == "kept too\n", "it has begun")
    kill_and_wait(cluster, "keeper")
    wait_until(lambda: out.read_text() == "kept too\n" * 2, "it has begun again")
    (second,) = cluster.wait_state(run, "running")
    assert (first["number"], second["number"]) == (0, 1)
    assert not is_alive(first["pid"])
    lost = [fact for fact in cluster.facts(run) if fact["kind"] == "attempt.exited"]
    assert [fact["lost"] for fact in lost] == [True]


@pytest.mark.parametrize("is_controller_new", [False, True])
def test_keeper_and_agent_dead_at_once_are_replaced_by_the_controller(
    cluster, tmp_path, is_controller_new
):
    out = tmp_path / "values"
    script = f'cat <&$ARGOSY_SECRET_KEY_FD >> {out}; echo " $VALUE" >> {out}; sleep 1000'
    role = {"command": ["sh", "-c", script], "restart": "permanent", "secrets": ["KEY"]}
    environment = {**os.environ, "VALUE": "kept"}
    run = cluster.submit({"main": role}, env=environment, secrets={"KEY": "deep"}, service=True)
    (first,) = cluster.wait_state(run, "running")
    wait_until(lambda: out.exists() and out.read_text() == "deep kept\n", "it has begun")
    if is_controller_new:
        kill_and_wait(cluster, "controller")
    kill_and_wait(cluster, "keeper", "agent")
    wait_until(lambda: out.read_text() == "deep kept\ndeep kept\n", "it has begun again")
    (second,) = cluster.wait_state(run, "running")
    assert second["number"] == 1
    assert not is_alive(first["pid"])


def test_everything_dead_at_once_comes_back_with_the_next_command(cluster, halt):
    role = {"command": ["sleep", "1000"], "restart": "permanent"}
    run = cluster.submit({"main": role}, service=True)
    (first,) = cluster.wait_state(run, "running")
    pids = cluster.pids()
    for part in ("keeper", "agent", "controller"):
        halt(pids[part])
    for part in ("keeper", "agent", "controller"):
        os.kill(pids[part], signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids.values())), "all of them are gone")
    bring_up(cluster.paths)
    view = cluster.view(run)
    assert view["run"] == run
    assert not is_alive(first["pid"])
    # Its environment was in memory alone and is gone with everybody who held it.
    wait_until(
        lambda: any(
            "environment" in fact.get("error", "") or fact.get("lost")
            for fact in cluster.facts(run)
            if fact["kind"] == "attempt.exited"
        ),
        "the loss is told",
    )


def test_a_stream_breaks_with_the_controller_and_goes_on_after_it(cluster, follow, tmp_path):
    gate = tmp_path / "gate"
    script = f"echo one; while [ ! -e {gate} ]; do sleep 0.05; done; echo two"
    run = cluster.submit({"main": {"command": ["sh", "-c", script]}})
    stream = follow(f"/v1/runs/{run}/stream")
    for event, data in stream.events():
        if event == "line" and data["text"] == "one":
            break
    kill_and_wait(cluster, "controller")
    gate.touch()
    again = follow(f"/v1/runs/{run}/stream", last_id=stream.last_id)
    lines = [data["text"] for event, data in again.events() if event == "line"]
    assert lines == ["two"]


def test_an_idle_cluster_ends_by_itself_but_not_with_a_service_alive(idle_cluster):
    run = idle_cluster.submit({"main": {"command": ["sleep", "1000"]}}, service=True)
    idle_cluster.wait_state(run, "running")
    deadline = time.monotonic() + 2 * IDLE_SECONDS
    while time.monotonic() < deadline:
        # Looking on disk: a request would count as activity.
        assert os.path.exists(idle_cluster.paths.http_socket)
        time.sleep(0.1)
    idle_cluster.post(f"/v1/runs/{run}/stop", {})
    wait_until(lambda: not idle_cluster.leftovers(), "the cluster has ended")


def test_a_probe_makes_a_process_ready_and_what_waits_for_it_starts(cluster, tmp_path):
    flag = tmp_path / "flag"
    roles = {
        "server": {
            "command": ["sh", "-c", f"sleep 0.2; touch {flag}; sleep 1000"],
            "ready": {"file": str(flag), "every_seconds": 0.02},
        },
        "client": {"command": ["sh", "-c", f"test -e {flag}"], "after_ready": ["server"]},
    }
    run = cluster.submit(roles)
    wait_until(
        lambda: any(
            fact["kind"] == "attempt.exited" and ".client." in fact["attempt"]
            for fact in cluster.facts(run)
        ),
        "the client has run",
    )
    kinds = [
        (fact["kind"], fact["attempt"].split(".")[1])
        for fact in cluster.facts(run)
        if fact["kind"] in ("attempt.ready", "attempt.started")
    ]
    assert kinds.index(("attempt.ready", "server")) < kinds.index(("attempt.started", "client"))


def test_a_process_that_is_never_ready_fails_with_the_reason(cluster):
    role = {
        "command": ["sleep", "1000"],
        "ready": {"file": "/never/there", "every_seconds": 0.02, "timeout_seconds": 0.2},
    }
    view = cluster.wait_ended(cluster.submit({"main": role}))
    assert view["outcome"] == "failed"
    assert "/never/there" in view["reason"] + str(cluster.facts(view["run"]))


def test_the_file_of_an_earlier_start_makes_nobody_ready(cluster, tmp_path):
    first = "touch ready; until [ -e go ]; do sleep 0.01; done; exit 1"
    role = {
        "command": ["sh", "-c", f"[ $ARGOSY_RESTARTS = 0 ] || exec sleep 1000; {first}"],
        "cwd": str(tmp_path),
        "ready": {"file": "ready", "every_seconds": 0.02, "timeout_seconds": 0.5},
        "restart": "transient",
        "budget": {"user": 1},
    }
    run = cluster.submit({"main": role})
    cluster.wait_state(run, "ready")
    (tmp_path / "go").touch()
    view = cluster.wait_ended(run)
    facts = cluster.facts(run)
    assert [fact["attempt"] for fact in facts if fact["kind"] == "attempt.ready"] == [
        f"{run}.main.0.0"
    ]
    assert "ready is older than the process" in view["reason"] + str(facts)


def test_output_over_its_limit_is_dropped_at_the_head(cluster):
    script = "i=0; while [ $i -lt 40 ]; do i=$((i+1)); head -c 65535 /dev/zero | tr '\\0' x; echo; done; echo last; sleep 0.2"
    run = cluster.submit({"main": {"command": ["sh", "-c", script], "log_bytes": 200_000}})
    assert cluster.wait_ended(run)["outcome"] == "succeeded"
    (process,) = cluster.processes(run)
    assert cluster.lines(run)[-1]["text"] == "last"
    kept = wait_until(
        lambda: (size := os.stat(process["stdout"]).st_blocks * 512) < 600_000 and size,
        "the head is dropped",
    )
    assert kept < os.path.getsize(process["stdout"])
