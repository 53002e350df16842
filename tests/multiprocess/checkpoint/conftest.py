"""Ranks of the tests beside this file are the forks of the tests of `move`, and their cluster is that of the tests of the command line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


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


@pytest.fixture
def ranks(forked):
    """Forks in one group of torch.distributed that has no collectives: `run(size, body)`."""
    import torch._dynamo  # DTensor imports it at first use: once here instead of once per fork
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    def run(size, body, name="job"):
        def join(rank, directory):
            torch.set_num_threads(1)
            store = dist.FileStore(str(directory / "store"), size)
            dist.init_process_group("fake", store=store, rank=rank, world_size=size)

        return forked(size, lambda rank, _: body(rank), join, name)

    return run
