from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest


def _load(name):
    """Import a file beside this one: tests directories are no packages."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


keeper_client = _load("keeper_client")


@pytest.fixture
def client():
    """The module with `Peer`, `Agent`, `KeeperUnderTest`, `wait_until`, `processes_of`."""
    return keeper_client


@pytest.fixture
def no_leaks(tmp_path):
    """After the test: no process of its directory is left, and no descriptor of ours."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    keeper_client.wait_until(
        lambda: not keeper_client.processes_of(tmp_path),
        f"the end of {keeper_client.processes_of(tmp_path)}",
        seconds=10.0,
    )
    keeper_client.wait_until(
        lambda: len(os.listdir("/proc/self/fd")) <= before,
        f"the close of descriptors ({before} before)",
        seconds=5.0,
    )


@pytest.fixture
def make_keeper(tmp_path, no_leaks):
    """Start keepers of this test's own; they are ended afterwards."""
    made = []

    def make(*options, directory=None):
        keeper = keeper_client.KeeperUnderTest(directory or tmp_path / "cluster", *options)
        made.append(keeper)
        return keeper

    yield make
    for keeper in made:
        keeper.end()


@pytest.fixture
def keeper(make_keeper):
    """One keeper with the containment that it finds best."""
    return make_keeper()


@pytest.fixture
def agent(keeper):
    """An agent of that keeper."""
    return keeper.agent()


@pytest.fixture
def start_saver():
    """Start a process that will say for so long that its save goes on, once it is asked to end; its order."""
    program = Path(__file__).parent / "programs" / "steady_saver.py"

    def start(keeper, agent, seconds, end):
        order = keeper.order(sys.executable, str(program), str(seconds), end)
        agent.spawn(order)
        keeper_client.wait_until(lambda: "armed" in keeper.output(order), "the trap")
        return order

    return start
