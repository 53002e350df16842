"""Kill -9 of any part of the runtime: no user process dies of it (the keeper's excepted), nothing is lost or doubled."""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from argosy.cli.connection import Controller
from argosy.control.home import look_at_cluster

pytestmark = [pytest.mark.multiprocess, pytest.mark.faults]

SLEEPER = ["--", sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
# A child that leaves the session, the process group and the parent behind.
DAEMONISER = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            return "State:\tZ" not in file.read()
    except OSError:
        return False


def assert_history_is_whole(facts):
    seqs = [fact["seq"] for fact in facts]
    assert seqs == sorted(set(seqs))
    for kind in ("attempt.planned", "attempt.started", "attempt.exited"):
        attempts = [fact["attempt"] for fact in facts if fact["kind"] == kind]
        assert len(attempts) == len(set(attempts)), f"{kind} doubled"


@pytest.mark.parametrize("part", ["controller", "agent"])
def test_a_killed_part_comes_back_and_readopts_every_process(cluster, part):
    run = cluster.detach("-n", "4", *SLEEPER)
    before = cluster.wait_running(run, 4)
    old = cluster.pids()[part]
    os.kill(old, signal.SIGKILL)
    cluster.wait_until(lambda: cluster.pids().get(part) not in (None, old), f"a new {part}")
    assert cluster.wait_running(run, 4) == before
    cluster.argosy("stop", run)
    assert not any(is_alive(pid) for pid in before)
    assert cluster.view(run)["outcome"] == "stopped"
    assert_history_is_whole(cluster.facts(run))


def test_exits_seen_while_controller_and_agent_are_dead_are_not_lost(cluster):
    run = cluster.detach("-n", "1", "--restart", "0", *SLEEPER)
    (victim,) = cluster.wait_running(run, 1)
    pids = cluster.pids()
    for part in ("controller", "agent"):
        os.kill(pids[part], signal.SIGKILL)
    os.kill(victim, signal.SIGKILL)
    cluster.wait_until(lambda: cluster.view(run)["state"] == "ended", "the run has ended")
    exits = [fact for fact in cluster.facts(run) if fact["kind"] == "attempt.exited"]
    assert [fact["signal"] for fact in exits] == [signal.SIGKILL]


def test_a_killed_keeper_leaves_no_descendant_and_restart_policies_apply(cluster, tmp_path):
    pidfile = tmp_path / "daemons"
    program = tmp_path / "daemoniser.py"
    program.write_text(DAEMONISER)
    run = cluster.detach("-n", "2", "--", sys.executable, program, pidfile)
    before = cluster.wait_running(run, 2)
    daemons = cluster.wait_until(
        lambda: (
            (lines := pidfile.read_text().split() if pidfile.exists() else [])
            and len(lines) == 2
            and lines
        ),
        "the daemons run",
    )
    os.kill(cluster.pids()["keeper"], signal.SIGKILL)
    cluster.wait_until(
        lambda: not any(is_alive(pid) for pid in [*before, *map(int, daemons)]),
        "the old tree is gone",
    )
    cluster.wait_until(
        lambda: len(pids := cluster.running_pids(run)) == 2 and not set(pids) & set(before),
        "a new generation runs",
    )
    assert cluster.view(run)["roles"][0]["generation"] == 2


def test_questions_are_answered_whatever_part_dies(cluster, monkeypatch):
    cluster.argosy("up")
    monkeypatch.setenv("ARGOSY_HOME", str(cluster.home))
    found = look_at_cluster()
    is_over = threading.Event()

    def ask():
        while not is_over.is_set():
            assert Controller(found).get("/v1/status")["version"]

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            for part in ("keeper", "controller", "agent", "keeper"):
                old = cluster.wait_until(lambda part=part: cluster.pids().get(part), part)
                os.kill(old, signal.SIGKILL)
                cluster.wait_until(
                    lambda part=part, old=old: cluster.pids().get(part) not in (None, old),
                    f"a new {part}",
                )
        finally:
            is_over.set()
    for each in asking:
        each.result()


def test_nothing_of_a_run_survives_stop(cluster, tmp_path):
    pidfile = tmp_path / "daemons"
    program = tmp_path / "daemoniser.py"
    program.write_text(DAEMONISER)
    run = cluster.detach("--", sys.executable, program, pidfile)
    cluster.wait_running(run, 1)
    cluster.wait_until(lambda: pidfile.exists() and pidfile.read_text().split(), "the daemon runs")
    cluster.argosy("stop", run)
    assert not any(is_alive(int(pid)) for pid in pidfile.read_text().split())


def test_a_run_outlives_its_client_unless_tied(cluster):
    free = cluster.start("run", "--name", "free", *SLEEPER)
    tied = cluster.start("run", "--name", "tied", "--tied", *SLEEPER)
    for client in (free, tied):
        assert client.stdout.readline() == "up\n"
        client.kill()
    cluster.wait_until(lambda: cluster.view("tied")["state"] == "ended", "the tied run has ended")
    assert cluster.view("free")["state"] == "running"


def test_a_gang_of_plain_torchrun_style_ranks_heals_after_a_kill(cluster, tmp_path):
    script = str(Path(__file__).parents[2] / "examples" / "plain_torchrun.py")
    cluster.environment |= {"CHECKPOINT": str(tmp_path / "state.npz"), "STEPS": "250"}
    run = cluster.detach("-n", "4", script)
    # Asked for beforehand: between the first save and the kill nothing may take longer than the training does.
    pids = cluster.wait_running(run, 4)
    cluster.wait_until(lambda: (tmp_path / "state.npz").exists(), "the first save")
    os.kill(pids[1], signal.SIGKILL)
    cluster.wait_until(lambda: cluster.view(run)["state"] == "ended", "the run has ended")
    view = cluster.view(run)
    out = cluster.argosy("logs", run).stdout
    assert view["exit_code"] == 0, out
    assert "resumed at step" in out
    assert view["roles"][0]["generation"] == 2
