"""The state of an optimizer as bytes and back."""

import math

import pytest
import torch

from argosy.errors import ConfigError
from argosy.train.images import Image, read


def whole(image):
    memory = torch.full((image.num_bytes,), 7, dtype=torch.uint8)
    # In two shares and any order, as two owners would.
    places = range(len(image.pieces))
    image.write(memory, [place for place in places if place % 2])
    image.write(memory, [place for place in places if not place % 2])
    return memory


def test_a_state_comes_back_with_its_types_and_bits():
    twice = torch.tensor([1.5, -0.0])
    state = {
        "state": {0: {"step": torch.tensor(3.0), "lists": [twice, None, (1, 0.1 + 0.2)], "t": 1}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "fused": True}],
        1: torch.tensor([[1, 2], [3, 4]], dtype=torch.int16),
        "half": torch.tensor([3.0], dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "empty": torch.empty(0, 3),
        "again": twice,
        "edges": [math.inf, -0.0, 2**60, ""],
    }
    found = read(whole(Image(state)))
    assert found["param_groups"] == state["param_groups"]
    assert type(found["param_groups"][0]["betas"]) is tuple
    inner = found["state"][0]
    assert inner["lists"][1:] == [None, (1, 0.1 + 0.2)]
    assert inner["lists"][0] is found["again"]
    assert math.copysign(1, found["again"][1].item()) == math.copysign(1, found["edges"][1]) == -1
    assert (found["edges"], inner["t"]) == (state["edges"], 1)
    for key in (1, "half", "turned", "empty"):
        assert found[key].dtype == state[key].dtype
        assert torch.equal(found[key], state[key])


def test_equal_states_have_equal_bytes_and_others_do_not():
    def make(value):
        return Image({"a": [torch.full((5,), value)], "b": 1})

    assert torch.equal(whole(make(1.0)), whole(make(1.0)))
    assert make(1.0).checksum == make(1.0).checksum != make(2.0).checksum


def test_what_cannot_be_kept_is_refused_by_name():
    for value in ({1}, object(), torch.ones(2).to_sparse(), lambda: None):
        with pytest.raises(ConfigError, match=r"keeps a \w+ as state\['x'\]\[0\]"):
            Image({"x": [value]})
