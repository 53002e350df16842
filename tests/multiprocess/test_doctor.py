"""`argosy doctor` as a person runs it: real checks, broken hosts made on purpose, nothing left behind."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from argosy.control import hostchecks

pytestmark = pytest.mark.multiprocess

NAMES = {
    "interpreter", "torch", "CPU instructions", "kernels", "memory", "shared memory", "huge pages", "home", "disk", "limits",
    "clock", "processes", "containment", "memory limits", "stacks", "name lookup",
}  # fmt: skip


def doctor(home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from argosy.cli.app import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ
        | {"ARGOSY_HOME": str(home), "XDG_RUNTIME_DIR": str(home.parent)}
        | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )


def cgroups() -> set[str]:
    return {str(path) for path in Path("/sys/fs/cgroup").glob("*/argosy-doctor-*")}


def test_it_checks_everything_and_leaves_nothing_behind(tmp_path):
    before = cgroups()
    done = doctor(tmp_path / "home", "--json")
    report = json.loads(done.stdout)
    assert {check["name"] for check in report["checks"]} == NAMES
    assert done.returncode == (1 if report["broken"] else 0)
    assert all(check.get("mend") for check in report["checks"] if check["state"] != "ok")
    assert [check for check in report["checks"] if "could not be checked" in check["detail"]] == []
    assert cgroups() == before
    assert list((tmp_path / "home").glob(".doctor-*")) == []


def test_a_torch_that_dies_and_a_home_that_is_a_file_are_two_broken_lines(tmp_path):
    (tmp_path / "home").write_text("not a directory")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGILL)\n")
    done = doctor(tmp_path / "home", PYTHONPATH=str(modules))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    broken = {line.split()[1]: line for line in lines if line.startswith("broken")}
    assert "dies with SIGILL" in broken["torch"]
    assert "is not a directory" in broken["home"]
    assert lines[lines.index(broken["home"]) + 1].strip().startswith("mend: ")
    assert "broken" in lines[-1]


def test_an_unknown_option_is_refused_before_anything_is_looked_at(tmp_path):
    done = doctor(tmp_path / "home", "--jsn")
    assert done.returncode == 64
    assert "--jsn" in done.stderr
    assert "fix: " in done.stderr
    assert not (tmp_path / "home").exists()


def test_help_says_what_it_does(tmp_path):
    done = doctor(tmp_path / "home", "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout


def test_a_probe_that_hangs_is_ended_with_its_children(tmp_path):
    before = set(psutil.Process().children())
    pid_file = tmp_path / "pid"
    script = f"sleep 1000 & echo $! > {pid_file}; wait"
    code, _, _, _ = hostchecks.run_child(["sh", "-c", script], timeout_seconds=1.0)
    assert code is None
    child = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != "zombie":
        assert time.monotonic() < deadline, f"{child} lives on"
    left = set(psutil.Process().children()) - before
    assert {process.pid for process in left} <= {child}, "only a zombie that another test adopts"


def test_a_direct_write_reads_back_and_removes_its_file(tmp_path):
    # Some file systems refuse O_DIRECT; the file must be gone all the same.
    with contextlib.suppress(OSError):
        hostchecks.write_directly(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_an_error_of_the_disk(tmp_path):
    with pytest.raises(FileNotFoundError):
        hostchecks.write_directly(str(tmp_path / "absent"))
