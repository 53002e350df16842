"""Ranks that joined re-form in the same process when a peer is killed: the example, a real keeper, a real zygote."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_reform.py"


def order(keeper, rank, world_size, generation):
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ARGOSY_GENERATION": str(generation),
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "STEPS": "60",
        "STEP_SECONDS": "0.02",
    }
    return keeper.order(
        script=EXAMPLE, index=rank, generation=generation, env=env, threads=1, rank=rank
    )


@pytest.fixture
def gang(keeper, agent, client):
    warm = {"python": client.PYTHON, "preload": ["torch", "torch.distributed"], "env": {}}
    orders = [order(keeper, rank, 3, 1) for rank in range(3)]
    reply = agent.spawn(*orders, zygote=warm, store={"host": "127.0.0.1"})
    assert reply["ok"], reply
    pids = {}
    for made in orders:
        started = agent.wait_event("started", attempt=made["attempt"])
        assert started["how"] == "fork", started
        pids[made["attempt"]] = started["pid"]
        agent.wait_event("link", attempt=made["attempt"], message={"say": "join", "generation": 1})
        # The first step is always reported; later ones a few times a second.
        agent.wait_event("link", attempt=made["attempt"], message={"say": "step", "step": 1})
    return warm, orders, pids


def reform(agent, members, store):
    for rank, member in enumerate(members):
        message = {"tell": "reform", "generation": 2, "rank": rank, "world_size": 3}
        message |= {"master_addr": store["host"], "master_port": store["port"]}
        message |= {"world_size": store["world_size"], "hosted": store["hosted"]}
        assert agent.request("tell", attempt=member["attempt"], message=message)["ok"]


def check_finished(keeper, agent, order):
    exited = agent.wait_event("exited", attempt=order["attempt"])
    assert exited["code"] == 0, keeper.output(order, "stderr") + keeper.output(order)
    assert "done: [60, 60]" in keeper.output(order)


def test_survivors_and_a_replacement_go_on_after_a_kill(keeper, agent, gang):
    warm, orders, pids = gang
    victim = orders.pop(1)
    os.kill(pids[victim["attempt"]], signal.SIGKILL)
    agent.wait_event("exited", attempt=victim["attempt"])
    newcomer = order(keeper, 2, 3, 2)
    # First the store alone, as its host is known only when it is there; then whoever is new.
    store = agent.spawn(zygote=warm, store={"host": "127.0.0.1"}, generation=2)["store"]
    agent.spawn(newcomer, zygote=warm, store={"host": "127.0.0.1"}, generation=2)
    reform(agent, orders, {**store, "world_size": 3})
    for made in (*orders, newcomer):
        check_finished(keeper, agent, made)
    for made in orders:
        shown = re.findall(r"generation (\d+)\) from step (\d+), pid (\d+)", keeper.output(made))
        assert [(generation, int(pid)) for generation, _, pid in shown] == [
            ("1", pids[made["attempt"]]),
            ("2", pids[made["attempt"]]),
        ]
        assert "rank 1 of generation 1 died (signal 9)" in keeper.output(made)
    assert keeper.output(newcomer).count("from step") == 1
    assert "from step 0" not in keeper.output(newcomer)


def test_survivors_go_on_alone_with_fewer(keeper, agent, gang):
    warm, orders, pids = gang
    victim = orders.pop(0)
    os.kill(pids[victim["attempt"]], signal.SIGKILL)
    agent.wait_event("exited", attempt=victim["attempt"])
    store = agent.spawn(zygote=warm, store={"host": "127.0.0.1"}, generation=2)["store"]
    reform(agent, orders, {**store, "world_size": 2})
    for made in orders:
        check_finished(keeper, agent, made)


def test_an_arena_of_the_run_outlives_the_rank_that_made_it(keeper, agent, client, tmp_path):
    path = tmp_path / "arena.py"
    path.write_text(
        "import os, signal, sys\n"
        "from argosy.move import broker\n"
        "if sys.argv[1] == 'make':\n"
        "    os.pwrite(broker.create('kept', 4096, scope='run').descriptor, b'kept', 0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print(os.pread(broker.open('kept').descriptor, 4, 0))\n"
    )
    warm = {"python": client.PYTHON, "preload": [], "env": {}}
    maker, reader = keeper.order("make", script=path), keeper.order("read", script=path)
    assert agent.spawn(maker, zygote=warm)["ok"]
    assert agent.wait_event("exited", attempt=maker["attempt"])["signal"] == signal.SIGKILL
    assert agent.spawn(reader, zygote=warm)["ok"]
    exited = agent.wait_event("exited", attempt=reader["attempt"])
    assert exited["code"] == 0, keeper.output(reader, "stderr")
    assert keeper.output(reader) == "b'kept'\n"
    assert agent.request("end_run", run="run-1")["ok"]
