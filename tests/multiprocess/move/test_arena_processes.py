"""Arenas between real processes: by the keeper inside a run, by handed-over descriptors outside one."""

import os
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.multiprocess

MODEL = """
import os, signal, sys, torch
from argosy.errors import ArenaGone, ConfigError
from argosy.move import arenas
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
"""
MAKER = """
arena = arenas.create("state", 1 << 20, scope="run")
scratch = arenas.create("scratch", 1 << 20)
arena.adopt(model)
pool = arenas.Pool(scope="run", prefix="spare", growth_bytes=1 << 20)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.fill_(3)
print(*pool.locate(pool.empty((4,)).fill_(6)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
REPLACEMENT = """
arena = arenas.open("state")
arena.bind(model)
assert all((parameter == 3).all() for parameter in model.parameters())
assert all(arena.is_inside(parameter) for parameter in model.parameters())
name, offset = sys.argv[1:]
assert arenas.open(name).at(int(offset), (4,), torch.float32).tolist() == [6.0] * 4
try:
    arenas.open("scratch")
except ArenaGone as gone:
    assert "create it first" in gone.fix
else:
    raise SystemExit("an arena of a dead process is still there")
arena.seal()
with arenas.open("state") as reader:
    assert reader.is_reader
    reader.tensor("0.weight").zero_()
assert (model[0].weight == 3).all()
model[0].weight.data.fill_(4)
print("replaced")
"""


def shared_bytes():
    """Shared memory of the whole host."""
    with open("/proc/meminfo") as file:
        return int(re.search(r"Shmem:\s+(\d+)", file.read())[1]) * 1024


def test_a_replacement_maps_the_bytes_of_a_killed_rank_and_the_runs_end_frees_them(
    keeper, agent, client, tmp_path
):
    maker, replacement = tmp_path / "maker.py", tmp_path / "replacement.py"
    maker.write_text(MODEL + MAKER)
    replacement.write_text(MODEL + REPLACEMENT)
    environment = {"ARGOSY_RUN": "run-1"}
    first = keeper.order(client.PYTHON, str(maker), env=environment)
    assert agent.spawn(first)["ok"]
    exited = agent.wait_event("exited", attempt=first["attempt"])
    assert exited["signal"] == signal.SIGKILL, keeper.output(first, "stderr")
    name, offset = keeper.output(first).split()
    kept = {arena["name"] for arena in agent.request("list")["arenas"]}
    assert kept == {"state", name}
    second = keeper.order(client.PYTHON, str(replacement), name, offset, env=environment)
    assert agent.spawn(second)["ok"]
    exited = agent.wait_event("exited", attempt=second["attempt"])
    assert exited["code"] == 0, keeper.output(second, "stderr")
    assert keeper.output(second) == "replaced\n"
    assert agent.request("end_run", run="run-1")["arenas"] == 2
    assert agent.request("list")["arenas"] == []


def test_memory_goes_back_when_a_process_without_a_cluster_is_killed(client):
    size = 256 << 20
    program = (
        "import os, torch\n"
        "from argosy.move import arenas\n"
        f"arena = arenas.create('big', {size}, scope='run')\n"
        "child = os.fork()\n"
        "if child == 0: import signal; signal.pause()\n"
        "print('made', child, flush=True)\n"
        "import signal; signal.pause()\n"
    )
    # Other programs use shared memory too: most of the size must appear and go.
    before = shared_bytes()
    made = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said = made.stdout.readline().split()
        while_both_live = shared_bytes() - before
        made.kill()
        made.wait()
        while_the_child_lives = shared_bytes() - before
    finally:
        os.killpg(made.pid, signal.SIGKILL)
        made.stdout.close()
        made.wait()
    assert said[0] == "made"
    # A forked child maps it as well: it lives exactly as long as its last user.
    assert min(while_both_live, while_the_child_lives) > size // 2
    client.wait_until(lambda: shared_bytes() - before < size // 2, "the memory's return")
