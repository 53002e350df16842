from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.control.keeper.census import cluster_key
from argosy.control.keeper.containment import roots_of_cluster
from argosy.control.keeper.sweep import start_keeper, sweep_dead_keeper
from argosy.errors import ClusterError

pytestmark = pytest.mark.multiprocess

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve('/bin/sh', ['sh', '-c', 'echo $$ > %s; exec sleep 1000'], {env})
    os._exit(0)
os.wait()
print('up', flush=True)
time.sleep(1000)
"""


def start_daemon(keeper, agent, client, tmp_path, env="dict(os.environ)"):
    path = tmp_path / "daemon.pid"
    order = keeper.python(DAEMON.replace("{env}", env) % path)
    agent.spawn(order)
    pid = agent.wait_event("started", attempt=order["attempt"])["pid"]
    client.wait_until(lambda: path.exists() and path.read_text().strip(), "the daemon")
    return order, pid, int(path.read_text())


@pytest.mark.parametrize("method", ["cgroup2", "freezer", "scan"])
def test_a_sweep_ends_all_that_a_killed_keeper_left(make_keeper, client, tmp_path, method):
    try:
        keeper = make_keeper("--containment", method)
    except AssertionError as error:
        pytest.skip(str(error)[:200])
    env = "dict(os.environ)" if method == "scan" else "{'PATH': os.environ['PATH']}"
    agent = keeper.agent()
    _, pid, daemon = start_daemon(keeper, agent, client, tmp_path, env)
    keeper.kill()
    client.wait_until(lambda: not client.is_alive(pid), "the death signal")
    assert client.is_alive(daemon)
    killed = sweep_dead_keeper(str(keeper.directory), str(keeper.runtime))
    assert [text for text in killed if text.startswith(f"{daemon} ")]
    assert not client.is_alive(daemon)
    assert roots_of_cluster(cluster_key(str(keeper.directory))) == []
    assert sweep_dead_keeper(str(keeper.directory), str(keeper.runtime)) == []


def test_a_sweep_leaves_a_live_keeper_alone(keeper, agent, client, tmp_path):
    _, pid, daemon = start_daemon(keeper, agent, client, tmp_path)
    assert sweep_dead_keeper(str(keeper.directory), str(keeper.runtime)) == []
    assert client.is_alive(pid)
    assert client.is_alive(daemon)


def test_a_new_keeper_sweeps_before_it_accepts_work(keeper, agent, client, tmp_path):
    _, _, daemon = start_daemon(keeper, agent, client, tmp_path)
    old = agent.welcome["keeper"]
    keeper.kill()
    keeper.start()
    new = keeper.agent()
    assert new.welcome["keeper"] != old
    assert not client.is_alive(daemon)
    assert new.request("list")["attempts"] == []


def test_exits_that_nobody_acknowledged_are_reported_by_the_next_keeper(keeper, agent):
    order = keeper.order("sh", "-c", "exit 9")
    agent.spawn(order)
    number = agent.wait_event("exited", attempt=order["attempt"])["number"]
    old = agent.welcome["keeper"]
    keeper.kill()
    keeper.start()
    new = keeper.agent()
    (listed,) = new.request("list")["attempts"]
    assert (listed["attempt"], listed["state"]) == (order["attempt"], "exited")
    exited = new.wait_event("exited", attempt=order["attempt"])
    assert (exited["code"], exited["was"]) == (9, [old, number])
    new.request("ack", through=exited["number"])
    assert os.listdir(keeper.directory / "exits") == []


def test_a_second_keeper_of_the_same_directory_says_so_and_exits(keeper):
    base = [sys.executable, "-m", "argosy.control.keeper", "--directory", str(keeper.directory)]
    again = subprocess.run(
        [*base, "--runtime", str(keeper.runtime), "--no-services"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert again.returncode == 75
    assert "another keeper keeps" in again.stderr
    assert keeper.agent().request("statistics")["ok"]


def hand_over(sock, frames):
    for frame, fd in frames:
        body = json.dumps(frame).encode()
        data = struct.pack(">I", len(body)) + body
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd else []
        sock.sendmsg([data], rights)


def test_a_new_keeper_inherits_arenas_and_blobs(keeper, agent):
    order = keeper.order("sleep", "1000")
    agent.spawn(order)
    agent.wait_event("started", attempt=order["attempt"])
    link = keeper.worker(order)
    link.send({"type": "arena_create", "id": 1, "name": "w", "size": 4096, "scope": "run"})
    os.pwrite(link.receive()["_fds"][0], b"weights", 0)
    agent.request("put_blob", name="env", data='{"GREETING": "hello"}')
    holds = [agent.wait_other("hold", name="run-1/w"), agent.wait_other("hold", name="env")]
    keeper.kill()
    ours, theirs = socket.socketpair()
    frames = [({k: v for k, v in hold.items() if k != "_fds"}, hold["_fds"][0]) for hold in holds]
    hand_over(ours, [*frames, ({"type": "end"}, 0)])
    keeper.start("--inherit", str(theirs.fileno()), pass_fds=(theirs.fileno(),))
    ours.close()
    theirs.close()
    new = keeper.agent()
    listed = new.request("list")
    assert [(a["name"], a["run"], a["scope"]) for a in listed["arenas"]] == [("w", "run-1", "run")]
    assert listed["blobs"] == ["env"]
    order = keeper.order("sh", "-c", "echo $GREETING; exec sleep 1000", env_blob="env")
    new.spawn(order)
    new.wait_event("started", attempt=order["attempt"])
    link = keeper.worker(order)
    link.send({"type": "arena_open", "id": 1, "name": "w"})
    assert os.pread(link.receive()["_fds"][0], 7, 0) == b"weights"
    assert new.wait_other("hold", name="run-1/w")


def test_an_agent_may_hand_back_what_it_holds_over_its_own_link(keeper, agent):
    fd = os.memfd_create("a")
    os.ftruncate(fd, 4096)
    agent.send(
        {"type": "hold", "id": 77, "kind": "arena", "name": "r/x", "run": "r", "scope": "run"}
        | {"size": 4096, "fds": 1},
        [fd],
    )
    os.close(fd)
    (arena,) = agent.request("list")["arenas"]
    assert (arena["run"], arena["name"], arena["size"]) == ("r", "x", 4096)


def test_shutdown_ends_everything_and_leaves_nothing(keeper, agent, client, tmp_path):
    _, pid, daemon = start_daemon(keeper, agent, client, tmp_path)
    assert agent.request("shutdown", grace_seconds=0.1)["ok"]
    agent.wait_event("exited")
    assert keeper.process.wait(30) == 0
    assert not client.is_alive(pid)
    assert not client.is_alive(daemon)
    assert not (keeper.directory / "keeper.json").exists()
    assert sorted(os.listdir(keeper.runtime)) == ["keeper.lock"]


def test_sigterm_is_a_shutdown(keeper, agent, client, tmp_path):
    _, pid, daemon = start_daemon(keeper, agent, client, tmp_path)
    keeper.process.terminate()
    assert keeper.process.wait(30) == 0
    assert not client.is_alive(pid)
    assert not client.is_alive(daemon)


def test_start_keeper_starts_a_daemon_and_is_fine_with_one_that_runs(
    tmp_path, client, no_leaks, make_keeper
):
    directory, runtime = tmp_path / "cluster", tmp_path / "r"
    options = ["--no-services"]
    start_keeper(str(directory), str(runtime), options=options)
    start_keeper(str(directory), str(runtime), options=options)
    agent = client.Agent(str(runtime / "keeper.sock"))
    pid = agent.welcome["pid"]
    seen = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    assert int(seen[1]) != os.getpid()
    assert int(seen[3]) != os.getsid(0)
    agent.request("shutdown")
    client.wait_until(lambda: not client.is_alive(pid), "the keeper's end")
    agent.close()


def test_start_keeper_shows_the_log_when_the_keeper_cannot_start(tmp_path, no_leaks):
    blocked = tmp_path / "file"
    blocked.write_text("")
    directory = tmp_path / "cluster"
    with pytest.raises(ClusterError) as raised:
        start_keeper(str(directory), str(blocked / "runtime"), options=["--no-services"])
    assert "Not a directory" in raised.value.what


def test_services_are_restarted_and_hold_the_keepers_sockets(make_keeper, client, tmp_path):
    """Without the real ones: `PYTHONPATH` is not touched, so the modules are the installed ones or fail quickly."""
    keeper = make_keeper("--services")
    agent = None

    def pids():
        return json.loads((keeper.directory / "keeper.json").read_text())["services"]

    client.wait_until(pids, "a first start")
    agent = client.Agent(keeper.socket_path)
    keeper.peers.append(agent)
    first = client.wait_until(lambda: pids().get("controller"), "the controller")
    try:
        os.kill(first["pid"], signal.SIGKILL)
    except ProcessLookupError:
        pass
    client.wait_until(
        lambda: pids().get("controller", first)["pid"] != first["pid"], "a new controller"
    )
    assert client.is_alive(keeper.pid)


def test_a_full_disk_costs_records_and_logs_but_no_process(make_keeper, client, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    keeper = None
    try:
        keeper = make_keeper(directory=small / "cluster")
        agent = keeper.agent()
        (small / "filler").write_bytes(b"")
        with open(small / "filler", "wb", buffering=0) as filler:
            try:
                while filler.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        order = keeper.order("sh", "-c", "echo text; exit 5")
        loud = keeper.order("sh", "-c", "seq 1000; exit 6", tty=True)
        agent.spawn(order, loud)
        assert agent.wait_event("exited", attempt=order["attempt"])["code"] is not None
        assert agent.wait_event("exited", attempt=loud["attempt"])["code"] == 6
        assert "No space left" in agent.wait_event("note")["text"]
        assert agent.request("statistics")["ok"]
    finally:
        if keeper is not None:
            keeper.end()
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_the_lock_is_not_passed_on_to_children(keeper, agent):
    order = keeper.order("sleep", "1000")
    agent.spawn(order)
    agent.wait_event("started", attempt=order["attempt"])
    keeper.kill()
    with open(keeper.runtime / "keeper.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_new_keeper_ends_the_services_that_survived_the_old_one(keeper, agent, client):
    from argosy.control.keeper.census import look_at

    survivor = subprocess.Popen(["sleep", "1000"])
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        path = keeper.directory / "keeper.json"
        content = json.loads(path.read_text())
        content["services"] = {
            "agent": {"pid": survivor.pid, "start": look_at(survivor.pid).start},
            # Another process has that number by now: its start time differs.
            "controller": {"pid": bystander.pid, "start": look_at(bystander.pid).start - 1},
        }
        keeper.kill()
        path.write_text(json.dumps(content))
        keeper.start()
        assert survivor.wait(30) == -signal.SIGTERM
        keeper.agent().request("statistics")
        assert bystander.poll() is None
    finally:
        survivor.kill()
        bystander.kill()
        survivor.wait()
        bystander.wait()


def test_many_who_start_a_keeper_at_once_get_the_same_one(tmp_path, client, no_leaks):
    directory, runtime = str(tmp_path / "cluster"), str(tmp_path / "r")
    code = (
        "import sys; from argosy.control.keeper.sweep import start_keeper; "
        "start_keeper(sys.argv[1], sys.argv[2], options=['--no-services'])"
    )
    starters = [
        subprocess.Popen([sys.executable, "-c", code, directory, runtime]) for _ in range(4)
    ]
    assert [starter.wait(60) for starter in starters] == [0, 0, 0, 0]
    agent = client.Agent(f"{runtime}/keeper.sock")
    log = (tmp_path / "cluster" / "keeper.log").read_text()
    assert log.count("another keeper keeps") == 3
    pid = agent.welcome["pid"]
    agent.request("shutdown")
    client.wait_until(lambda: not client.is_alive(pid), "the keeper's end")
    agent.close()


def test_a_sweep_never_ends_the_process_that_asks_for_it(keeper, agent, client, tmp_path):
    """The `argosy` command may itself have been started by a process of the dead keeper."""
    env = {**os.environ, "ARGOSY_MARK": f"{cluster_key(str(keeper.directory))}.old.attempt...."}
    order = keeper.order("sleep", "1000")
    agent.spawn(order)
    agent.wait_event("started", attempt=order["attempt"])
    keeper.kill()
    code = (
        "import sys; from argosy.control.keeper.sweep import sweep_dead_keeper; "
        "sweep_dead_keeper(sys.argv[1], sys.argv[2]); print('alive')"
    )
    command = [sys.executable, "-c", code, str(keeper.directory), str(keeper.runtime)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n")
