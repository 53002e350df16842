"""Two checkpoints compared: distances in numbers and in last places, shares, and what is only on one side."""

import math

import numpy as np
import pytest
import torch

from argosy.checkpoint import Checkpointer, diffs


@pytest.fixture
def compared(tmp_path, monkeypatch):
    monkeypatch.setattr(diffs, "STRETCH_ELEMENTS", 1000)

    def run(first, second):
        with Checkpointer(tmp_path) as checkpointer:
            for step, tensors in ((1, first), (2, second)):
                checkpointer.save(step, {"t": tensors}, streams=False)
            with checkpointer.open(1) as old, checkpointer.open(2) as new:
                found = diffs.diff(old, new)
        return found, {one.name.removeprefix("t/"): one for one in found.changed}

    return run


def test_distances_and_shares(compared):
    x = torch.linspace(-3, 3, 5000)
    moved = x.clone()
    moved[4321] = torch.from_numpy(np.nextafter(moved[4321].numpy(), np.float32(9)).reshape(1))[0]
    b = torch.tensor([1.0, -1.0, 0.0, 2.0]).bfloat16()
    first = {"x": x, "b": b, "n": torch.arange(10), "same": torch.ones(70_000)}
    c = b.clone()
    c[2] = -0.0
    c[3] = 2.03125
    second = {"x": moved, "b": c, "n": torch.arange(10) * 3, "same": torch.ones(70_000)}
    found, changed = compared(first, second)
    assert changed["x"].max_ulp == 1.0
    assert changed["x"].changed_share == 1 / 5000
    assert 0 < changed["x"].max_abs < 1e-6
    assert changed["b"].changed_share == 0.5
    assert changed["b"].max_abs == 0.03125
    assert changed["b"].max_ulp == 2.0
    assert (changed["n"].max_abs, changed["n"].max_ulp) == (18.0, None)
    assert "same" not in changed
    assert not found.is_equal


def test_what_is_not_a_number_is_infinitely_far_and_equal_to_itself(compared):
    first = {"a": torch.tensor([math.nan, 1.0]), "b": torch.tensor([math.nan, math.inf])}
    second = {"a": torch.tensor([2.0, 1.0]), "b": torch.tensor([math.nan, math.inf])}
    _, changed = compared(first, second)
    assert changed["a"].max_abs == math.inf
    assert "b" not in changed


def test_other_names_shapes_and_dtypes_are_told(compared):
    first = {"gone": torch.ones(1), "shape": torch.ones(4), "dtype": torch.ones(2)}
    second = {"new": torch.ones(1), "shape": torch.ones(2, 2), "dtype": torch.ones(2).half()}
    found, changed = compared(first, second)
    assert changed == {}
    assert (found.only_first, found.only_second) == (["t/gone"], ["t/new"])
    assert sorted(found.reshaped) == ["t/dtype", "t/shape"]
