"""The way from a typed command to a submitted run imports nothing heavy."""

import subprocess
import sys

import pytest

HEAVY = {
    "asyncio",
    "msgspec",
    "rich",
    "argparse",
    "http.client",
    "starlette",
    "subprocess",
    "dataclasses",
    "torch",
    "numpy",
}
MODULES = {
    "run": "argosy.cli.run argosy.cli.follow argosy.cli.output",
    "ps": "argosy.cli.ps",
    "status": "argosy.cli.cluster",
    "logs": "argosy.cli.logs",
}


@pytest.mark.parametrize("verb", MODULES)
def test_a_verb_imports_nothing_heavy(verb):
    program = f"import sys, argosy.cli.app, {', '.join(MODULES[verb].split())}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert HEAVY & set(done.stdout.split()) == set()
