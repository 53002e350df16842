"""Messages between real ranks of one host, and of two pretended ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAMS = Path(__file__).parent.parent / "programs"
CASES = re.findall(r"^def (case_\w+)", (PROGRAMS / "message_cases.py").read_text(), re.MULTILINE)
STARTS = {"one host": "", "two hosts": "1"}


@pytest.fixture(scope="module", params=STARTS)
def outcome(request):
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "forked_ranks.py"), "message_cases.py", "3"],
        env=os.environ
        | {
            "SPLIT": STARTS[request.param],
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_agree_that(outcome, case):
    said = outcome["3"][case]
    assert said == ["ok"] * 3, "\n".join(sorted(set(said)))
