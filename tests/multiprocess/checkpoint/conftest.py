"""Ranks of the tests beside this file: the forks of the tests of `move`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "argosy_tests_forked_ranks"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        _NAME, Path(__file__).parents[1] / "move" / "conftest.py"
    )
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])

forked = sys.modules[_NAME].forked
