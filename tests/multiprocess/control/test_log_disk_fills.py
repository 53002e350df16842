"""The disk of the logs fills while a process writes: people are told, the process and the cluster go on."""

import contextlib
import os
import subprocess
import time

import pytest

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a small disk"),
]
DEADLINE_SECONDS = 60.0


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "home"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=False)


def wait_until(condition, what):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value


def test_a_log_disk_that_fills_is_told_and_survived(small_disk, cluster, tmp_path):
    gate = tmp_path / "gate"
    block = "x" * 1023
    script = (
        f"i=0; while [ $i -lt 28000 ]; do echo {block}; i=$((i+1)); done; "
        f"while [ ! -e {gate} ]; do sleep 0.05; done; echo end"
    )
    run = cluster.submit({"main": {"command": ["bash", "-c", script]}})
    wait_until(
        lambda: any("full" in f["text"] for f in cluster.facts(run) if f["kind"] == "note"),
        "the warning",
    )
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
    (process,) = cluster.processes(run)
    assert process["state"] == "running"
    os.unlink(filler)
    gate.touch()
    view = cluster.wait_ended(run)
    assert view["outcome"] == "succeeded"
    # What bash said of the full disk, on stderr, may be noticed after it.
    said = [line["text"] for line in cluster.lines(run, tail=1000) if line["stream"] == "out"]
    assert said[-1] == "end"
