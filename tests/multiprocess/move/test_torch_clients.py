"""DDP, FSDP2, HSDP, DTensor, tensor parallelism, checkpoints and pipelining on the argosy backend, checked against Gloo."""

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
CASES = re.findall(
    r"^def (case_\w+)", (PROGRAMS / "torch_client_cases.py").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def outcome():
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "forked_ranks.py"), "torch_client_cases.py", "2,4"],
        env=os.environ
        | {
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "OMP_NUM_THREADS": "1",
            # Half precision on this CPU: doctor explains it.
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
        },
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("size", ["2", "4"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_gloo(outcome, case, size):
    said = outcome[size][case]
    assert said == ["ok"] * int(size), "\n".join(sorted(set(said)))
