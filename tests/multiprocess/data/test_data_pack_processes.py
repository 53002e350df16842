"""`argosy data pack` with real processes: equal bytes in parallel, kill -9 and Ctrl-C in the middle, nobody left behind."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.multiprocess

PACK = [sys.executable, "-m", "argosy", "data", "pack", "in.jsonl", "--jsonl", "text", "--json"]


@pytest.fixture
def folder(tmp_path):
    with open(tmp_path / "in.jsonl", "w", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"text": f"document {number} " + "words " * 60}) + "\n"
            for number in range(90_000)
        )
    return tmp_path


def finish(folder, *more):
    done = subprocess.run(
        [*PACK, *more], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def interrupt(folder, number):
    """Start packing, wait until some shards are done, send the signal; returns process and its workers."""
    partial = folder / "b.bin.partial"
    num_before = len(list(partial.glob("*.json")))
    packer = subprocess.Popen(
        [*PACK, "--out", "b.bin", "--workers", "2"],
        cwd=folder,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while len(list(partial.glob("*.json"))) < num_before + 2:
        assert packer.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    workers = psutil.Process(packer.pid).children()
    if number == signal.SIGINT:
        os.killpg(packer.pid, number)
    else:
        packer.send_signal(number)
    errors = packer.communicate(timeout=30)[1].decode()
    psutil.wait_procs(workers, timeout=30)
    assert not [worker for worker in workers if worker.is_running()]
    assert not (folder / "b.bin").exists()
    return packer.returncode, errors


def test_packing_gives_equal_bytes_in_parallel_and_after_kills(folder):
    alone = finish(folder, "--out", "a.bin", "--workers", "1")
    assert interrupt(folder, signal.SIGKILL) == (-9, "")
    code, errors = interrupt(folder, signal.SIGINT)
    assert code == 130
    assert errors == "argosy: stopped; the same command goes on from here\n"
    together = finish(folder, "--out", "b.bin", "--workers", "2")
    assert together["resumed_shards"] >= 4
    assert together["sha256"] == alone["sha256"]
    for name in (".bin", ".bin.documents", ".bin.json"):
        assert (folder / f"a{name}").read_bytes() == (folder / f"b{name}").read_bytes()
    assert not (folder / "b.bin.partial").exists()


def test_two_packers_of_one_file_do_not_meet(folder, halt):
    held = subprocess.Popen([*PACK, "--out", "c.bin", "--workers", "1"], cwd=folder)
    try:
        deadline = time.monotonic() + 30
        while not list((folder / "c.bin.partial").glob("*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        halt(held.pid)
        second = subprocess.run(
            [*PACK, "--out", "c.bin"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        assert second.returncode == 64
        assert "another process is packing" in second.stderr
    finally:
        held.send_signal(signal.SIGCONT)
        assert held.wait(timeout=60) == 0
