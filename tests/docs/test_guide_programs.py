"""The programs of the data movement guides run as they stand, on two ranks (four where a mesh asks for them)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PROGRAM = re.compile(
    r"```python\n(# (\w+\.py) +torchrun --nproc-per-node[ =](\d) \w+\.py\n.*?)```", re.DOTALL
)
QUICK = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
"""torch's store looks up names of addresses: a machine without a resolver would wait for each."""

DRIVER = '''
"""Ranks as torchrun starts them, forked from one process that has torch."""
import os, runpy, socket, sys, traceback
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor, torch.nn.parallel

def rank_of(program, rank, size, port):
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        runpy.run_path(program, run_name="__main__")
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

failed = []
for argument in sys.argv[1:]:
    program, size = argument.split(":")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = [rank_of(program, rank, int(size), port) for rank in range(int(size))]
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        failed.append(program)
sys.exit(f"failed: {failed}" if failed else 0)
'''


@pytest.mark.multiprocess
def test_programs_of_the_guides_run_as_shown(tmp_path):
    documents = ("move-in-your-own-script.md", "reshard.md", "../reference/exchange.md")
    texts = [(GUIDES / name).read_text() for name in documents]
    programs = [found for text in texts for found in PROGRAM.findall(text)]
    assert [name for _, name, _ in programs] == [
        "ddp.py",
        "fsdp.py",
        "share.py",
        "follow.py",
        "reshard.py",
        "step.py",
    ]
    for text, name, _ in programs:
        (tmp_path / name).write_text(text)
    (tmp_path / "driver").write_text(DRIVER)
    driver = subprocess.Popen(
        [sys.executable, "driver", *(f"{name}:{size}" for _, name, size in programs)],
        cwd=tmp_path,
        env=QUICK,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = driver.communicate(timeout=250)
    except subprocess.TimeoutExpired:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()
        raise
    assert driver.returncode == 0, errors
    assert "lower bound" in output


@pytest.mark.multiprocess
def test_programs_with_arenas_run_as_shown_inside_a_run(tmp_path):
    """There an arena's name means the same memory in all ranks."""
    text = (GUIDES / "move-in-your-own-script.md").read_text()
    environment = {**QUICK, "ARGOSY_HOME": str(tmp_path / "home")}
    argosy = [sys.executable, "-m", "argosy"]
    try:
        for name in ("byname.py", "share.py", "follow.py"):
            program = re.search(rf"```python\n(# {name}.*?)```", text, re.DOTALL)
            (tmp_path / name).write_text(program[1])
            done = subprocess.run(
                [*argosy, "run", "-n", "2", "--restart", "0", name],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=250,
            )
            assert done.returncode == 0, done.stderr
    finally:
        subprocess.run([*argosy, "down", "--force"], env=environment, check=True, timeout=60)
