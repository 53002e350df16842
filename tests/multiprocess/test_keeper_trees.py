from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from argosy.control.keeper import census
from argosy.control.keeper.census import look_at

pytestmark = pytest.mark.multiprocess

METHODS = ["cgroup2", "freezer", "scan"]

# A child in its own session, a double-forked daemon, and one whose environment is empty as well.
FAMILY = """
import os, sys, time
def daemon(path, env):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve('/bin/sh', ['sh', '-c', 'echo $$ > ' + path + '.new; mv ' + path + '.new ' + path + '; exec sleep 1000'], env)
        os._exit(0)
    os.wait()
for name in sys.argv[1].split(','):
    path = sys.argv[2] + '/' + name
    if name == 'child':
        if os.fork() == 0:
            open(path + '.new', 'w').write(str(os.getpid())); os.rename(path + '.new', path)
            time.sleep(1000)
    elif name == 'setsid':
        if os.fork() == 0:
            os.setsid()
            open(path + '.new', 'w').write(str(os.getpid())); os.rename(path + '.new', path)
            time.sleep(1000)
    elif name == 'daemon':
        daemon(path, dict(os.environ))
    elif name == 'nameless':
        daemon(path, {'PATH': os.environ['PATH']})
while not all(os.path.exists(sys.argv[2] + '/' + name) for name in sys.argv[1].split(',')):
    time.sleep(0.002)
{end}
"""


@pytest.fixture(params=METHODS)
def method_keeper(request, make_keeper):
    try:
        return make_keeper("--containment", request.param)
    except AssertionError as error:
        if "cannot be used" in str(error):
            pytest.skip(f"{request.param} is not usable here")
        raise


def start_family(keeper, agent, client, tmp_path, names, end="time.sleep(1000)"):
    place = tmp_path / "pids"
    place.mkdir(exist_ok=True)
    order = keeper.order(
        client.PYTHON, "-c", FAMILY.replace("{end}", end), ",".join(names), str(place)
    )
    agent.spawn(order)

    def pids():
        paths = [place / name for name in names]
        return all(path.exists() for path in paths) and [int(p.read_text()) for p in paths]

    return order, client.wait_until(pids, "the family")


def provable(keeper_options, names):
    return [n for n in names if n != "nameless"] if "scan" in keeper_options else names


def test_kill_ends_the_whole_tree(method_keeper, client, tmp_path):
    agent = method_keeper.agent()
    names = provable(method_keeper.options, ["child", "setsid", "daemon", "nameless"])
    order, pids = start_family(method_keeper, agent, client, tmp_path, names)
    agent.request("kill", attempt=order["attempt"])
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert exited["signal"] == signal.SIGKILL
    # The shell's `mv` may still be there beside them.
    assert exited["swept"] >= len(names)
    assert not [pid for pid in pids if client.is_alive(pid)]


def test_what_a_finished_leader_left_behind_is_swept_before_its_exit_is_told(
    method_keeper, client, tmp_path
):
    agent = method_keeper.agent()
    names = provable(method_keeper.options, ["child", "daemon", "nameless"])
    order, pids = start_family(
        method_keeper, agent, client, tmp_path, names, end="import os; os._exit(4)"
    )
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert not [pid for pid in pids if client.is_alive(pid)]
    assert exited["code"] == 4
    assert exited["swept"] >= len(names)


def test_scan_reports_what_it_cannot_prove_and_leaves_it_alone(make_keeper, client, tmp_path):
    keeper = make_keeper("--containment", "scan")
    agent = keeper.agent()
    order, (pid,) = start_family(
        keeper, agent, client, tmp_path, ["nameless"], end="import os; os._exit(0)"
    )
    agent.wait_event("exited", attempt=order["attempt"])
    note = agent.wait_event("note")
    assert str(pid) in note["text"]
    assert "left alone" in note["text"]
    assert client.is_alive(pid)
    os.kill(pid, signal.SIGKILL)
    # The keeper is its parent by now, and reaps it though it knows nothing of it.
    client.wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the stranger to be reaped")


def test_the_leader_is_asked_first_and_the_tree_is_killed_after_the_grace(
    method_keeper, client, tmp_path
):
    agent = method_keeper.agent()
    order, pids = start_family(
        method_keeper,
        agent,
        client,
        tmp_path,
        ["child", "daemon"],
        end="import signal; signal.signal(15, lambda *a: os.write(1, b'asked\\n'))\n"
        "print('armed', flush=True)\nwhile True: time.sleep(1000)",
    )
    client.wait_until(lambda: "armed" in method_keeper.output(order), "the trap")
    agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=1000)
    client.wait_until(lambda: "asked" in method_keeper.output(order), "the question")
    assert client.is_alive(pids[0])
    # Said again with a shorter grace: the shorter one counts, and the signal is not repeated.
    agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=0.05)
    agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=1000)
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert exited["signal"] == signal.SIGKILL
    assert method_keeper.output(order).count("asked") == 1
    assert not [pid for pid in pids if client.is_alive(pid)]


def test_a_stop_that_is_obeyed_needs_no_kill(method_keeper):
    agent = method_keeper.agent()
    order = method_keeper.order("sleep", "1000")
    agent.spawn(order)
    agent.wait_event("started", attempt=order["attempt"])
    agent.request("stop", attempt=order["attempt"], signal="TERM", grace_seconds=60)
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert (exited["signal"], exited["swept"]) == (signal.SIGTERM, 0)


def test_a_stopped_process_is_ended_too(method_keeper, client):
    agent = method_keeper.agent()
    order = method_keeper.order("sleep", "1000")
    agent.spawn(order)
    pid = agent.wait_event("started", attempt=order["attempt"])["pid"]
    agent.request("signal", attempt=order["attempt"], signal="SIGSTOP")
    client.wait_until(
        lambda: Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "T", "the stop"
    )
    agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=60)
    assert agent.wait_event("exited", attempt=order["attempt"])["signal"] == signal.SIGTERM


def test_a_fork_bomb_in_small_is_swept_whole(method_keeper, client, tmp_path):
    code = """
import os, time
def grow(depth):
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if depth: grow(depth - 1)
            while True:
                time.sleep(0.002)
                if os.fork() == 0: os._exit(0)
                os.wait()
grow(2)
print('grown', flush=True)
time.sleep(1000)
"""
    agent = method_keeper.agent()
    order = method_keeper.python(code)
    agent.spawn(order)
    client.wait_until(lambda: "grown" in method_keeper.output(order), "the tree")
    agent.request("kill", attempt=order["attempt"])
    agent.wait_event("exited", attempt=order["attempt"])
    assert not [p for p in client.processes_of(tmp_path) if "argosy.control.keeper" not in p]


def test_orphans_that_end_by_themselves_are_reaped(keeper, agent, client, tmp_path):
    code = "import os, time\nfor _ in range(5):\n  if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(0.2)\n    os._exit(0)\nprint('done', flush=True)\ntime.sleep(1000)"
    order = keeper.python(code)
    agent.spawn(order)
    client.wait_until(lambda: "done" in keeper.output(order), "the forks")

    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children")
    client.wait_until(lambda: len(children.read_text().split()) == 1, "only the attempt itself")
    agent.request("kill", attempt=order["attempt"])
    agent.wait_event("exited", attempt=order["attempt"])


def test_no_cgroup_is_left_behind(method_keeper, client):
    from argosy.control.keeper.census import cluster_key
    from argosy.control.keeper.containment import roots_of_cluster

    cluster = cluster_key(str(method_keeper.directory))
    agent = method_keeper.agent()
    orders = [method_keeper.order("true", memory_bytes=1 << 30) for _ in range(5)]
    agent.spawn(*orders)
    for order in orders:
        agent.wait_event("exited", attempt=order["attempt"])

    def are_empty():
        return all(
            not [entry for entry in os.scandir(path) if entry.is_dir()]
            for _, path in roots_of_cluster(cluster)
        )

    client.wait_until(are_empty, "the removal of groups")
    method_keeper.end()
    assert roots_of_cluster(cluster) == []


def test_a_keeper_whose_empty_group_was_removed_makes_it_again(keeper, agent):
    from argosy.control.keeper.census import cluster_key
    from argosy.control.keeper.containment import roots_of_cluster

    for _, path in roots_of_cluster(cluster_key(str(keeper.directory))):
        os.rmdir(path)
    order = keeper.order("true")
    agent.spawn(order)
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0


def test_who_is_just_becoming_another_program_keeps_its_mark(tmp_path):
    """In the middle of an exec a process has no environment for a moment."""
    script = tmp_path / "again.sh"
    script.write_text('exec sh "$0"\n')
    with subprocess.Popen(["sh", script], env={"ARGOSY_MARK": "k.me."}) as process:
        try:
            found = set()
            for _ in range(500):
                found |= set(census.marks_of({process.pid: look_at(process.pid)}).values())
        finally:
            process.kill()
    assert found == {"k.me."}


def test_who_has_no_environment_is_waited_for_once():
    with subprocess.Popen(["sleep", "60"], env={}) as process:
        try:
            seen, bare = {process.pid: look_at(process.pid)}, set()
            assert census.marks_of(seen, bare) == {process.pid: ""}
            assert bare == {(process.pid, seen[process.pid].start)}
            assert census.marks_of(seen, bare) == {process.pid: ""}
        finally:
            process.kill()
    assert census.marks_of({}, bare) == {}
    assert bare == set()
