"""Arenas between real processes: by the keeper inside a run, by handed-over descriptors outside one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.multiprocess

MODEL = """
import os, signal, sys, torch
from argosy.errors import ArenaGone, ConfigError, NoRoom
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
for name, size, error in (("huge", 1 << 45, NoRoom), ("a\\0b", 1 << 16, ConfigError)):
    try:
        arenas.create(name, size, scope="run")
    except error:
        continue
    raise SystemExit(f"{name!r} was made")
for name in ("huge", "é" * 512):
    arenas.create(name, 1 << 16).close()
arena.seal()
with arenas.open("state") as reader:
    assert reader.is_reader
    reader.tensor("0.weight").zero_()
assert (model[0].weight == 3).all()
model[0].weight.data.fill_(4)
print("replaced")
"""


def users(inode):
    """Processes that have this memory mapped or open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_mapped = f" {inode} /memfd:" in (process / "maps").read_text()
            is_open = any(one.stat().st_ino == inode for one in (process / "fd").iterdir())
        except OSError:
            continue  # it has ended meanwhile
        if is_mapped or is_open:
            found.add(int(process.name))
    return found


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
        "print('made', child, os.fstat(arena.fileno()).st_ino, flush=True)\n"
        "import signal; signal.pause()\n"
    )
    made = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, child, inode = made.stdout.readline().split()
        while_both_live = users(int(inode))
        made.kill()
        made.wait()
        while_the_child_lives = users(int(inode))
    finally:
        os.killpg(made.pid, signal.SIGKILL)
        made.stdout.close()
        made.wait()
    assert said == "made"
    # A forked child maps it as well: it lives exactly as long as its last user.
    assert while_both_live == {made.pid, int(child)}
    assert while_the_child_lives == {int(child)}
    client.wait_until(lambda: not users(int(inode)), "the memory's return")
