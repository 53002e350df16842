from __future__ import annotations

import os
import signal

import pytest

pytestmark = pytest.mark.multiprocess


def restart(keeper, agent, client):
    before = keeper.log().count("goes on as a new program")
    assert agent.request("restart")["ok"]
    client.wait_until(
        lambda: keeper.log().count("goes on as a new program") > before, "the new program"
    )


def test_a_restart_in_place_keeps_children_memory_links_and_events(keeper, agent, client, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import time; print('up', flush=True); time.sleep(1000)")
    warm = {"python": client.PYTHON, "preload": ["json"], "env": {}}
    forked = keeper.order(script=path)
    sleeper = keeper.order("sleep", "1000", env={"RANK": "1"})
    spare = keeper.order("sh", "-c", "echo released $RANK", parked=True)
    typist = keeper.order("sh", "-c", "read line; echo got $line", tty=True)
    short = keeper.order("sh", "-c", "exit 2")
    agent.spawn(forked, zygote=warm)
    agent.spawn(sleeper, spare, typist, short)
    pids = {
        order["attempt"]: agent.wait_event("started", attempt=order["attempt"])["pid"]
        for order in (forked, sleeper, spare, typist)
    }
    exited = agent.wait_event("exited", attempt=short["attempt"])
    link = keeper.worker(sleeper)
    link.send({"type": "arena_create", "id": 1, "name": "w", "size": 4096, "scope": "run"})
    os.pwrite(link.receive()["_fds"][0], b"weights", 0)
    agent.request("put_blob", name="b", data="text")
    ports = agent.request("reserve", run="run-1", ports={"x": 0})["ports"]
    view = keeper.peer()
    view.hello("attach", attempt=typist["attempt"])
    zygotes = agent.request("statistics")["zygotes"]

    restart(keeper, agent, client)

    assert client.is_alive(keeper.pid)
    listed = agent.request("list")
    states = {a["attempt"]: (a["pid"], a["state"]) for a in listed["attempts"]}
    assert states[sleeper["attempt"]] == (pids[sleeper["attempt"]], "running")
    assert states[spare["attempt"]] == (pids[spare["attempt"]], "parked")
    assert states[short["attempt"]][1] == "exited"
    assert listed["blobs"] == ["b"]
    assert listed["ports"] == {"run-1": ports}
    assert agent.request("statistics")["zygotes"][0]["layers"][0] == zygotes[0]["layers"][0]
    # Links, terminals, gates, arenas and zygotes all go on.
    link.send({"type": "arena_open", "id": 2, "name": "w"})
    assert os.pread(link.receive()["_fds"][0], 7, 0) == b"weights"
    view.socket.sendall(b"hello\n")
    assert agent.wait_event("exited", attempt=typist["attempt"])["code"] == 0
    assert "got hello" in keeper.output(typist)
    agent.request("release", attempt=spare["attempt"], env={"RANK": "4"})
    assert agent.wait_event("exited", attempt=spare["attempt"])["code"] == 0
    assert keeper.output(spare) == "released 4\n"
    again = keeper.order(script=path)
    agent.spawn(again, zygote=warm)
    assert agent.wait_event("started", attempt=again["attempt"])["how"] == "fork"
    os.kill(pids[forked["attempt"]], signal.SIGKILL)
    last = agent.wait_event("exited", attempt=forked["attempt"])
    assert (last["signal"], last["number"] > exited["number"]) == (signal.SIGKILL, True)
    # A duplicate of what the old program started is not started again.
    assert agent.spawn(sleeper)["ok"]
    assert states[sleeper["attempt"]][0] == pids[sleeper["attempt"]]
    new = keeper.agent()
    new.request("list")
    assert new.wait_event("exited", attempt=short["attempt"])["number"] == exited["number"]


def test_an_exit_during_the_restart_is_not_lost(keeper, agent, client):
    orders = [keeper.order("sleep", "0.5") for _ in range(10)]
    agent.spawn(*orders)
    for _ in range(3):
        restart(keeper, agent, client)
    for order in orders:
        assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0


def test_restarts_leak_no_descriptor(keeper, agent, client):
    agent.request("put_blob", name="b", data="text")
    restart(keeper, agent, client)
    before = agent.request("statistics")["descriptors"]
    for _ in range(3):
        restart(keeper, agent, client)
    assert agent.request("statistics")["descriptors"] == before


def test_a_stop_that_was_under_way_goes_on_after_the_restart(keeper, agent, client):
    order = keeper.order("sh", "-c", "trap '' TERM; echo armed; while :; do sleep 1; done")
    agent.spawn(order)
    client.wait_until(lambda: "armed" in keeper.output(order), "the trap")
    agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=1.5)
    restart(keeper, agent, client)
    assert agent.wait_event("exited", attempt=order["attempt"])["signal"] == signal.SIGKILL


def test_a_save_that_goes_on_has_its_grace_anew_after_the_restart_too(
    keeper, agent, client, start_saver
):
    order = start_saver(keeper, agent, 9.0, "leave")
    agent.request("stop", attempt=order["attempt"], signal="SIGTERM", grace_seconds=4)
    restart(keeper, agent, client)
    assert agent.wait_event("exited", attempt=order["attempt"])["code"] == 0
