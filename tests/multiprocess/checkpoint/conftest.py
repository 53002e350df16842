"""Ranks of the tests beside this file are the forks of the tests of `move`, and their cluster is that of the tests of the command line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _load(folder):
    """The fixtures of another folder: tests directories are no packages."""
    name = f"argosy_tests_conftest_{folder}"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / folder / "conftest.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


forked = _load("move").forked
argosy = _load("cli").argosy
