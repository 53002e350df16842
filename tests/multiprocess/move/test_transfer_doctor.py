"""`argosy doctor --transfer` as a person runs it: real processes, their routes and reasons, nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.multiprocess
MAIN = "import sys; from argosy.cli.app import main; sys.exit(main(['doctor', *sys.argv[1:]]))"


def doctor(*words, **environment):
    return subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
        check=False,
    )


def test_every_pair_is_told_its_route_and_why(tmp_path):
    done = doctor("--transfer", "-n", "3", "--json", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    routes = json.loads(done.stdout)
    assert [(pair["first"], pair["second"]) for pair in routes["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    for pair in routes["pairs"]:
        assert pair["route"] == "shared memory"
        assert "nonce" in pair["why"]
        assert pair["copy_gb_per_second"] > 0
        assert pair["latency_us"] > 0
        assert pair["gloo"]
        assert pair["process_vm_readv"] or pair["process_vm_readv_why"]
    assert routes["failed"] == []
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize("words", [("-n", "1"), ("-n", "99"), ("-n",), ("--fast",)])
def test_other_words_are_refused_before_anything_starts(words):
    done = doctor("--transfer", *words)
    assert done.returncode == 64
    assert "fix: " in done.stderr


def test_a_probe_that_cannot_run_is_a_sentence(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken here')\n")
    done = doctor("--transfer", PYTHONPATH=str(tmp_path))
    assert done.returncode == 69
    assert "torch is broken here" in done.stderr
    assert "Traceback" not in done.stderr
