"""Random streams: what is drawn after a load is what would have been drawn; an accelerator's too, where one is used."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from argosy.checkpoint import streams


def drawn():
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_the_default_streams_go_on_where_they_were():
    state = streams.Process().state_dict()
    first = drawn()
    # As a load gives them: arrays have become tensors.
    state["python"]["words"] = torch.from_numpy(state["python"]["words"])
    state["numpy"]["state"]["key"]["array"] = torch.from_numpy(
        state["numpy"]["state"]["key"]["array"]
    )
    streams.Process().load_state_dict(state)
    assert drawn() == first
    assert "accelerator" not in state


class Device:
    """What torch has for a kind of device."""

    def __init__(self):
        self.state = torch.arange(16, dtype=torch.uint8)
        self.is_initialized = lambda: True

    def get_rng_state(self):
        return self.state.clone()

    def set_rng_state(self, state):
        self.state = state


@pytest.fixture
def device(monkeypatch):
    found = Device()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="cuda")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda: found)
    return found


def test_the_stream_of_an_accelerator_goes_on_where_it_was(device):
    state = streams.Process().state_dict()
    assert list(state["accelerator"]) == ["cuda"]
    device.state = torch.zeros(16, dtype=torch.uint8)
    streams.Process().load_state_dict({"accelerator": state["accelerator"]})
    assert device.state.tolist() == list(range(16))


def test_an_accelerator_that_is_not_in_use_is_left_alone(device):
    device.is_initialized = lambda: False
    assert "accelerator" not in streams.Process().state_dict()


def test_the_stream_of_another_kind_of_accelerator_is_left_alone(device):
    streams.Process().load_state_dict({"accelerator": {"xpu": torch.zeros(3)}})
    assert device.state.tolist() == list(range(16))


def test_without_an_accelerator_its_stream_is_not_missed(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    streams.Process().load_state_dict({"accelerator": {"cuda": torch.zeros(3)}})
