"""The examples do what their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.multiprocess
def test_the_shared_step_ends_with_the_same_bits_on_any_ranks_and_after_a_death(tmp_path):
    environment = {
        **os.environ,
        "ARGOSY_HOME": str(tmp_path / "home"),
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    argosy = [sys.executable, "-m", "argosy"]
    ends = []
    try:
        for ranks, more in (("2", []), ("3", ["--", "--die-at", "20"])):
            done = subprocess.run(
                [*argosy, "run", "-n", ranks, "examples/shared_step.py", *more],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=250,
            )
            assert done.returncode == 0, done.stderr
            assert ("rank 2 killed by SIGKILL" in done.stderr) == bool(more)
            ends.append(done.stdout.splitlines()[-1])
    finally:
        subprocess.run([*argosy, "down", "--force"], env=environment, check=True, timeout=60)
    assert ends[0] == ends[1]
    assert "version 60" in ends[0]
