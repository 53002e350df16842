"""Disks that fill, parts that are stopped, output of every kind: told clearly, survived, and nothing is lost."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.faults]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a small disk")


@contextlib.contextmanager
def mounted(path, options):
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            return "State:\tZ" not in file.read()
    except OSError:
        return False


def fill(path):
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 65536)
    with open(path, "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 512)


@pytest.fixture
def small_home(cluster):
    """The cluster's home is the root of a small disk."""
    with mounted(cluster.home, "size=24m") as disk:
        yield disk
        (disk / "filler").unlink(missing_ok=True)
        cluster.argosy("down", "--force", check=False)


@pytest.fixture
def log_disk(cluster):
    """The runs' directories are on a small disk of their own."""
    cluster.argosy("up")
    (directory,) = (cluster.home / "clusters").iterdir()
    with mounted(directory / "runs", "size=24m") as disk:
        yield disk


@needs_root
@pytest.mark.parametrize(
    ("options", "words"),
    [("size=4m", ["is full", "needed"]), ("ro,size=64m", ["Read-only file system"])],
    ids=["full", "unwritable"],
)
def test_a_home_that_cannot_be_used_is_refused_before_anything_starts(cluster, options, words):
    with mounted(cluster.home.parent / "disk", options) as disk:
        cluster.environment["ARGOSY_HOME"] = str(disk / "home")
        for verb in (["run", "--", "true"], ["up"]):
            done = cluster.argosy(*verb, check=False)
            assert done.returncode == 73
            assert all(word in done.stderr for word in words)
            assert "fix: " in done.stderr
        cluster.environment["ARGOSY_HOME"] = str(cluster.home)


@needs_root
def test_a_home_that_fills_keeps_its_run_which_can_be_seen_and_stopped(cluster, small_home):
    run = cluster.detach("--", "sh", "-c", "while :; do echo tick; sleep 0.1; done")
    pids = cluster.wait_running(run, 1)
    fill(small_home / "filler")
    refused = cluster.argosy("run", "--", "true", check=False)
    assert refused.returncode == 73
    assert "is full" in refused.stderr
    assert cluster.running_pids(run) == pids
    assert "tick" in cluster.argosy("logs", run, "--tail", "1").stdout
    cluster.argosy("stop", run)
    assert not any(is_alive(pid) for pid in pids)
    assert cluster.view(run)["outcome"] == "stopped"
    (small_home / "filler").unlink()
    assert cluster.argosy("run", "--", "echo", "well").stdout == "well\n"
    facts = cluster.facts(run)
    assert [f["seq"] for f in facts] == sorted({f["seq"] for f in facts})
    assert cluster.view(run)["outcome"] == "stopped"


@needs_root
def test_a_cluster_on_a_full_disk_can_be_taken_down_by_force_and_starts_nothing_again(
    cluster, small_home
):
    run = cluster.detach("-n", "2", "--restart", "5", "--", "sleep", "600")
    pids = cluster.wait_running(run, 2)
    fill(small_home / "filler")
    done = cluster.argosy("down", "--force", check=False)
    assert done.returncode == 0, done.stderr
    assert not any(is_alive(pid) for pid in pids)
    (small_home / "filler").unlink()
    cluster.argosy("up")
    assert (cluster.view(run)["state"], cluster.view(run)["outcome"]) == ("ended", "stopped")


def test_a_run_ends_though_the_record_of_its_exit_cannot_be_written(cluster):
    cluster.argosy("up")
    (directory,) = (cluster.home / "clusters").iterdir()
    shutil.rmtree(directory / "exits")
    assert cluster.argosy("run", "--", "echo", "well").stdout == "well\n"
    told = "an exit record could not be written"
    cluster.wait_until(lambda: told in cluster.argosy("events", "--all").stdout, told)


@needs_root
def test_ranks_outlive_a_log_disk_that_they_fill_and_people_are_warned(cluster, log_disk):
    gate = cluster.home.parent / "gate"
    code = (
        "import os, sys, time\n"
        "line = 'x' * 1023\n"
        "failed = 0\n"
        "for _ in range(20_000):\n"
        "    try: os.write(1, (line + '\\n').encode())\n"
        "    except OSError: failed += 1\n"
        f"while not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
        "print('the end', failed > 0, flush=True)\n"
    )
    run = cluster.detach("-n", "2", "--", sys.executable, "-c", code)
    pids = cluster.wait_running(run, 2)
    cluster.wait_until(lambda: free_bytes(log_disk) < 65536, "the disk is full")
    warning = cluster.wait_until(lambda: notes(cluster, run), "somebody is warned")[0]
    assert cluster.running_pids(run) == pids
    # Room again, as when somebody clears the disk: the story goes on where it was.
    drop_head(log_disk)
    gate.touch()
    cluster.wait_until(lambda: cluster.view(run)["state"] == "ended", "the end of the run")
    assert cluster.view(run)["outcome"] == "succeeded"
    assert "nearly full" in warning or "space" in warning
    assert warning in cluster.argosy("events", run).stdout
    assert "the end True" in cluster.argosy("logs", run, "--tail", "4").stdout


def notes(cluster, run):
    return [fact["text"] for fact in cluster.facts(run) if fact["kind"] == "note"]


def free_bytes(path):
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def drop_head(disk):
    """Free the space of what was written first, as a person would with `fallocate --punch-hole`."""
    for log in disk.glob("*/logs/*.out"):
        subprocess.run(
            ["fallocate", "--punch-hole", "--offset", "0", "--length", str(8 << 20), log],
            check=True,
        )


@pytest.mark.parametrize("part", ["keeper", "agent", "controller"])
def test_a_stopped_part_is_named_by_every_command_that_needs_it(cluster, part, halt):
    run = cluster.detach("--", "sleep", "600")
    pids = cluster.wait_running(run, 1)
    stopped = cluster.pids()[part]
    halt(stopped)
    try:
        ghost = cluster.start("run", "--name", "ghost", "--env", "NEW=1", "--", "true")
        stop = cluster.start("stop", run)
        for client in (ghost, stop):
            _, errors = client.communicate(timeout=30)
            assert client.returncode == 69
            assert f"the {part} (pid {stopped}) is stopped" in errors
            assert f"kill -CONT {stopped}" in errors
    finally:
        os.kill(stopped, signal.SIGCONT)
    if part == "controller":
        assert cluster.running_pids(run) == pids
        cluster.argosy("stop", run)
    cluster.wait_until(lambda: cluster.view(run)["state"] == "ended", "the stop was not forgotten")
    assert "ghost" not in cluster.argosy("ps", "--all").stdout


def test_down_by_force_ends_a_cluster_of_which_everything_is_stopped(cluster, halt):
    run = cluster.detach("--", "sleep", "600")
    pids = [*cluster.wait_running(run, 1), *cluster.pids().values()]
    for pid in pids:
        halt(pid)
    refused = cluster.argosy("down", check=False)
    assert refused.returncode == 69
    assert "kill -CONT" in refused.stderr
    cluster.argosy("down", "--force")
    assert not any(is_alive(pid) for pid in pids)


def test_a_stopped_rank_is_stopped_for_good(shared, halt):
    run = shared.detach("--", "sleep", "600")
    (pid,) = shared.wait_running(run, 1)
    halt(pid)
    shared.argosy("stop", run)
    assert not is_alive(pid)
    assert shared.view(run)["outcome"] == "stopped"


def test_bytes_that_are_no_text_and_a_last_line_without_end_arrive(shared):
    code = "import os; os.write(1, b'\\xff\\xfe\\x00bad\\r\\nno end')"
    one = shared.argosy("run", "--", sys.executable, "-c", code, text=False)
    assert one.stdout == b"\xff\xfe\x00bad\r\nno end"
    two = shared.argosy("run", "-n", "2", "--", sys.executable, "-c", code, text=False)
    assert two.stdout.decode().splitlines()[-1] == "[0-1] no end"
    assert "no end" in [line["text"] for line in shared.json("logs")["lines"]]


def test_logs_that_were_deleted_are_said_to_be_gone(shared):
    run = shared.detach("--", "echo", "hello")
    shared.wait_until(lambda: shared.view(run)["state"] == "ended", "the end of the run")
    shutil.rmtree(os.path.join(shared.view(run)["directory"], "logs"))
    done = shared.argosy("logs", run, check=False)
    assert done.returncode == 66
    assert "are gone" in done.stderr
    assert "fix: " in done.stderr
    assert shared.argosy("why", run).returncode == 0
    assert shared.argosy("run", "--", "echo", "well").stdout == "well\n"


def test_a_slow_reader_holds_up_neither_ranks_nor_memory(shared):
    code = (
        "import os\n"
        "block = (f\"rank {os.environ['RANK']} \" + 'x' * 1000 + '\\n').encode() * 25\n"
        "for _ in range(1000): os.write(1, block)\n"
    )
    client = shared.start("run", "--name", "flood", "-n", "4", "--", sys.executable, "-c", code)
    first = client.stdout.readline()
    assert first.startswith("[")
    # Nobody reads from here on: the ranks still come to their end.
    shared.wait_until(lambda: shared.view("flood")["outcome"] == "succeeded", "the ranks' end")
    assert client.poll() is None
    for pid in (*shared.pids().values(), client.pid):
        assert resident_bytes(pid) < 150 << 20
    client.stdout.close()
    assert client.wait(30) == 141


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
