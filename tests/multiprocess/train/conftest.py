"""Households of ranks that train: `run_cases(file, "case:3", …)` starts one process that forks them all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("household_cases.py")
SECONDS = 280.0


@pytest.fixture
def run_cases(tmp_path):
    return cases_in(tmp_path)


@pytest.fixture(scope="module")
def run_cases_together(tmp_path_factory):
    """For results that all tests of a file look at."""
    return cases_in(tmp_path_factory.mktemp("cases"))


@pytest.fixture
def results(everything):
    """Of the file's own `everything`: cases that ended well, and lost a rank if and only if they are named so."""

    def find(*wanted):
        for each in wanted:
            assert everything[each]["code"] == 0, everything[each]["errors"]
            is_killed = "was killed by signal 9" in everything[each]["errors"]
            assert is_killed == ("killed" in each), everything[each]["errors"]
        return [everything[each]["result"] for each in wanted]

    return find


def cases_in(tmp_path):
    def run(file, *wanted, variables=()):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ARGOSY_")}
        directory = tmp_path / f"cases-{len(list(tmp_path.iterdir()))}"
        done = subprocess.run(
            [sys.executable, str(PROGRAM), file, str(directory), *wanted],
            env={**environment, **dict(variables)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        for each in wanted:
            found[each]["said"] = done.stderr
        return found

    return run
