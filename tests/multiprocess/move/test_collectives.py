"""Every collective of the argosy backend on real ranks: with native code, without it, and across two pretended hosts."""

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
CASES = re.findall(r"^def (case_\w+)", (PROGRAMS / "collective_cases.py").read_text(), re.MULTILINE)
SPLIT = (
    "case_bits_are_equal_on_all_ranks",
    "case_an_average_beside_a_sum_is_a_mismatch",
    "case_halves_are_rounded_once_in_every_reduction",
    "case_a_mismatch_leaves_the_group_usable_on_all_hosts",
    "case_bytes_are_counted_where_they_go",
    "case_waits_for_another_host_are_stalls",
)
# (file of cases, ranks, whether with native code); one start of Python each
STARTS = {
    "native": ("collective_cases.py", "2,4", "1"),
    "torch operations": ("collective_cases.py", "2,3", "0"),
    "two hosts": ("split_host_cases.py", "3", "1"),
}


@pytest.fixture(scope="module", params=STARTS)
def outcome(request):
    file, sizes, native = STARTS[request.param]
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "forked_ranks.py"), file, sizes],
        env=os.environ
        | {
            "ARGOSY_NATIVE": native,
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


@pytest.mark.parametrize("case", [*CASES, *SPLIT])
def test_all_ranks_agree_that(outcome, case):
    ran = {size: cases[case] for size, cases in outcome.items() if case in cases}
    if not ran:
        assert case in (
            *SPLIT,
            "case_halves_are_added_in_single_precision_with_equal_bits_on_all_ranks",
        )
    for size, said in ran.items():
        assert said == ["ok"] * int(size), "\n".join(sorted(set(said)))
