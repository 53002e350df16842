from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from argosy.control.keeper.sweep import start_keeper

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def warm(client):
    """A light zygote: nothing heavy is imported."""
    return {"python": client.PYTHON, "preload": ["json"], "env": {"PYTHONHASHSEED": "0"}}


def script(tmp_path, code, name="script.py"):
    path = tmp_path / name
    path.write_text(code)
    return path


def zygote_pids(agent):
    entries = agent.request("statistics")["zygotes"]
    return [layer["pid"] for entry in entries for layer in entry["layers"]]


def zygote_pid(agent):
    return zygote_pids(agent)[0]


def test_a_batch_waits_for_its_zygote_and_is_forked(keeper, agent, warm, tmp_path):
    path = script(tmp_path, "import os, sys; print(os.getppid(), os.environ['RANK'], sys.argv[1:])")
    orders = [keeper.order("x", script=path, env={"RANK": str(rank)}) for rank in range(4)]
    assert agent.spawn(*orders, zygote=warm)["ok"]
    for rank, order in enumerate(orders):
        started = agent.wait_event("started", attempt=order["attempt"])
        exited = agent.wait_event("exited", attempt=order["attempt"])
        assert (started["how"], started["note"], exited["code"]) == ("fork", "", 0)
        # The keeper itself is the parent: the zygote's death costs nothing.
        assert keeper.output(order) == f"{keeper.pid} {rank} ['x']\n"
    assert zygote_pid(agent) not in (0, None)


def test_a_forked_process_is_in_its_own_cgroup_and_its_tree_is_swept(
    keeper, agent, warm, tmp_path, client
):
    path = script(
        tmp_path,
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    open('child', 'w').write(str(os.getpid()))\n"
        "    os.rename('child', 'child.pid')\n    time.sleep(1000)\n"
        "while not os.path.exists('child.pid'): time.sleep(0.005)\n",
    )
    order = keeper.order(script=path, cwd=tmp_path)
    agent.spawn(order, zygote=warm)
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert (exited["code"], exited["swept"]) == (0, 1)
    assert not client.is_alive(int((tmp_path / "child.pid").read_text()))


def test_the_zygotes_death_costs_no_rank_and_the_next_batch_gets_a_new_one(
    keeper, agent, warm, tmp_path, client
):
    path = script(tmp_path, "import time; print('up', flush=True); time.sleep(1000)")
    first = keeper.order(script=path)
    agent.spawn(first, zygote=warm)
    pid = agent.wait_event("started", attempt=first["attempt"])["pid"]
    client.wait_until(lambda: keeper.output(first) == "up\n", "the rank")
    old = zygote_pid(agent)
    os.kill(old, signal.SIGKILL)
    # A batch that reaches the dying one is started by exec; this one comes later.
    client.wait_until(
        lambda: old not in zygote_pids(agent), "the zygote's end, as the keeper sees it"
    )
    assert client.is_alive(pid)
    second = keeper.order(script=path)
    agent.spawn(second, zygote=warm)
    assert agent.wait_event("started", attempt=second["attempt"])["how"] == "fork"
    assert zygote_pid(agent) != old
    for order in (first, second):
        agent.request("kill", attempt=order["attempt"])
        agent.wait_event("exited", attempt=order["attempt"])


def test_a_zygote_that_dies_under_load_loses_no_attempt(keeper, agent, warm, tmp_path):
    path = script(tmp_path, "print('ran')")
    agent.request("warm", zygote=warm)
    orders = []
    for _ in range(6):
        batch = [keeper.order(script=path) for _ in range(4)]
        orders += batch
        agent.spawn(*batch, zygote=warm)
        for entry in agent.request("statistics")["zygotes"]:
            for layer in entry["layers"]:
                try:
                    os.kill(layer["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    continue
    for order in orders:
        exited = agent.wait_event("exited", attempt=order["attempt"])
        assert (exited["code"], keeper.output(order)) == (0, "ran\n")


def test_a_zygote_that_cannot_import_sends_the_batch_to_exec_and_says_why(
    keeper, agent, warm, tmp_path
):
    path = script(tmp_path, "print('ran')")
    bad = {**warm, "preload": ["no_such_module_at_all"]}
    order = keeper.order(script=path)
    agent.spawn(order, zygote=bad)
    started = agent.wait_event("started", attempt=order["attempt"])
    assert started["how"] == "exec"
    assert "no_such_module_at_all" in started["note"]
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0


def test_an_interpreter_that_does_not_exist_is_named(keeper, agent, warm, tmp_path):
    order = keeper.order(script=script(tmp_path, "pass"))
    agent.spawn(order, zygote={**warm, "python": "/no/such/python"})
    started = agent.wait_event("started", attempt=order["attempt"])
    assert (started["how"], "/no/such/python" in started["note"]) == ("exec", True)


def test_a_preload_with_threads_is_refused_and_named(keeper, agent, warm, tmp_path):
    (tmp_path / "threaded_module.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    bad = {**warm, "preload": ["threaded_module"], "env": {"PYTHONPATH": str(tmp_path)}}
    order = keeper.order(script=script(tmp_path, "print('ran')"))
    agent.spawn(order, zygote=bad)
    started = agent.wait_event("started", attempt=order["attempt"])
    assert (started["how"], "threaded_module" in started["note"]) == ("exec", True)
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0


def test_a_parked_fork_is_released_with_its_rank(keeper, agent, warm, tmp_path):
    path = script(tmp_path, "import os; print(os.environ['RANK'])")
    spare = keeper.order(script=path, parked=True)
    agent.spawn(spare, zygote=warm)
    assert agent.wait_event("started", attempt=spare["attempt"])["how"] == "fork"
    assert agent.request("list")["attempts"][0]["state"] == "parked"
    agent.request("release", attempt=spare["attempt"], env={"RANK": "7"}, gang={"rank": 7})
    assert agent.wait_event("exited", attempt=spare["attempt"])["code"] == 0
    assert keeper.output(spare) == "7\n"


def test_an_attempt_that_waits_for_its_zygote_can_be_stopped(keeper, agent, warm, tmp_path):
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(2)")
    slow = {**warm, "preload": ["slow_module"], "env": {"PYTHONPATH": str(tmp_path)}}
    order = keeper.order(script=script(tmp_path, "print('ran')"))
    other = keeper.order(script=tmp_path / "script.py")
    agent.spawn(order, other, zygote=slow)
    assert {a["state"] for a in agent.request("list")["attempts"]} == {"starting"}
    agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=5)
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert (exited["signal"], exited["code"]) == (signal.SIGTERM, None)
    assert agent.wait_event("exited", attempt=other["attempt"])["code"] == 0
    assert keeper.output(order) == ""


def test_secrets_reach_forked_processes(keeper, agent, warm, tmp_path):
    agent.request("put_blob", name="s", data="hush")
    path = script(tmp_path, "import os; print(os.read(int(os.environ['ARGOSY_SECRET_KEY_FD']), 9))")
    orders = [keeper.order(script=path, secret_blobs={"KEY": "s"}) for _ in range(2)]
    agent.spawn(*orders, zygote=warm)
    for order in orders:
        assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
        assert keeper.output(order) == "b'hush'\n"


def test_a_forked_process_can_have_a_terminal(keeper, agent, warm, tmp_path):
    path = script(tmp_path, "import os; print(os.isatty(0), os.isatty(1), os.ttyname(1) != '')")
    order = keeper.order(script=path, tty=True)
    agent.spawn(order, zygote=warm)
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
    assert keeper.output(order).split() == ["True", "True", "True"]


def test_a_batch_with_more_descriptors_than_one_message_carries_is_forked_in_parts(
    keeper, agent, warm, tmp_path
):
    path = script(tmp_path, "pass")
    orders = [keeper.order(script=path) for _ in range(70)]
    agent.spawn(*orders, zygote=warm)
    for order in orders:
        assert agent.wait_event("started", attempt=order["attempt"])["how"] == "fork"
        assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0


def test_survivors_are_told_that_rank_zero_hosts_when_no_helper_can_be_had(keeper, agent, warm):
    (order,) = orders = [keeper.order("sleep", "1000", env={"RANK": "0"})]
    agent.spawn(*orders)
    agent.wait_event("started", attempt=order["attempt"])
    # This warm parent has not imported what a store needs.
    reply = agent.spawn(zygote=warm, store={"host": "127.0.0.1"}, generation=2)
    assert reply["store"]["hosted"] is False
    agent.request("kill", attempt=order["attempt"])
    agent.wait_event("exited", attempt=order["attempt"])
    assert [e["text"] for e in agent.events if e["event"] == "note"] == []


@pytest.mark.slow
def test_a_gang_meets_at_the_store_that_a_helper_hosts(keeper, agent, client, tmp_path):
    warm = {"python": client.PYTHON, "preload": ["torch", "torch.distributed"], "env": {}}
    path = script(
        tmp_path,
        "import os, json, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "print(json.dumps([x.item(), os.environ['TORCHELASTIC_USE_AGENT_STORE']]))\n"
        "dist.destroy_process_group()\n",
    )

    def gang(generation):
        orders = [
            keeper.order(
                script=path,
                index=rank,
                generation=generation,
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "RES_OPTIONS": "timeout:1 attempts:1",
                },
            )
            for rank in range(2)
        ]
        reply = agent.spawn(
            *orders, zygote=warm, store={"host": "127.0.0.1"}, generation=generation
        )
        for order in orders:
            exited = agent.wait_event("exited", attempt=order["attempt"])
            assert exited["code"] == 0, keeper.output(order, "stderr")
            assert json.loads(keeper.output(order)) == [3.0, "True"]
        return reply["store"]["port"]

    first = gang(1)
    second = gang(2)
    assert first != second
    assert agent.request("end_run", run="run-1")["ok"]
    # The helpers belong to the keeper alone, and end with their generation.
    client.wait_until(
        lambda: not agent.request("statistics")["attempts"].get("running"), "the helpers' end"
    )
    reply = agent.spawn(zygote=warm, store={"host": "127.0.0.1"}, generation=3)
    assert reply["store"]["hosted"] is True
    agent.request("end_run", run="run-1")


def test_a_zygote_named_at_the_start_is_warm_before_anybody_asks(tmp_path, client, no_leaks, warm):
    directory, runtime = tmp_path / "cluster", tmp_path / "r"
    value = "value-of-a-variable"
    named = {**warm, "env": {**warm.get("env", {}), "TORCH_TOKEN": value}}
    start_keeper(str(directory), str(runtime), warm=named, options=["--no-services"])
    agent = client.Agent(str(runtime / "keeper.sock"))
    pid = agent.welcome["pid"]
    assert value.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            assert "argosy:warm" not in os.readlink(link)
    client.wait_until(
        lambda: (
            [
                layer["ready"]
                for entry in agent.request("statistics")["zygotes"]
                for layer in entry["layers"]
            ]
            == [True]
        ),
        "a ready zygote",
    )
    agent.request("shutdown")
    client.wait_until(lambda: not client.is_alive(pid), "the keeper's end")
    agent.close()


def test_idle_zygotes_expire(make_keeper, client, warm):
    keeper = make_keeper("--idle-seconds", "0.3")
    agent = keeper.agent()
    agent.request("warm", zygote=warm)
    pid = zygote_pid(agent)
    assert client.is_alive(pid)
    client.wait_until(lambda: agent.request("statistics")["zygotes"] == [], "the expiry")
    client.wait_until(lambda: not client.is_alive(pid), "the zygote's end")


def test_zygotes_of_different_keys_are_kept_apart_and_bounded(keeper, agent, client, warm):
    for number in range(6):
        agent.request("warm", zygote={**warm, "env": {"PYTHONHASHSEED": str(number)}})
    zygotes = agent.request("statistics")["zygotes"]
    assert len(zygotes) == 4
    agent.request("warm", zygote={**warm, "env": {"PYTHONHASHSEED": "5"}})
    assert len(agent.request("statistics")["zygotes"]) == 4


def test_changed_packages_make_a_new_zygote(keeper, agent, client, tmp_path):
    prefix = tmp_path / "venv"
    packages = prefix / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (prefix / "bin").mkdir()
    python = prefix / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {client.PYTHON} "$@"\n')
    python.chmod(0o755)
    warm = {"python": str(python), "preload": ["json"], "env": {}}
    agent.request("warm", zygote=warm)
    first = zygote_pid(agent)
    agent.request("warm", zygote=warm)
    assert zygote_pid(agent) == first
    (packages / "fresh.py").write_text("")
    os.utime(packages, ns=(1, 1))
    agent.request("warm", zygote=warm)
    assert zygote_pid(agent) != first
    client.wait_until(lambda: not client.is_alive(first), "the old zygote's end")


def test_a_changed_file_makes_a_new_zygote_for_new_gangs_and_not_for_one_that_re_forms(
    keeper, agent, client, tmp_path
):
    library = tmp_path / "library"
    library.mkdir()
    module = library / "edited_often.py"
    module.write_text("VALUE = 'old'")
    os.utime(module, ns=(1, 1))
    warm = {
        "python": client.PYTHON,
        "preload": ["edited_often"],
        "env": {"PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"},
    }
    path = script(tmp_path, "import edited_often; print(edited_often.VALUE)")

    def run(generation):
        order = keeper.order(script=path, generation=generation, env={"PYTHONPATH": str(library)})
        agent.spawn(order, zygote=warm, generation=generation)
        assert agent.wait_event("started", attempt=order["attempt"])["how"] == "fork"
        assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
        return keeper.output(order).strip()

    assert run(1) == "old"
    module.write_text("VALUE = 'new'")
    os.utime(module, ns=(2, 2))
    assert run(2) == "old", "a gang goes on with the code it was started with"
    assert run(1) == "new"
