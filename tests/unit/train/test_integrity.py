import itertools

import pytest
import torch
from torch import nn

from argosy.errors import ConfigError
from argosy.train.integrity import Integrity, Places
from argosy.train.memories import Weights

names = (f"weights-{number}" for number in itertools.count())


@pytest.fixture(params=[None, torch.bfloat16])
def weights(request):
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model[0].weight = nn.Parameter(torch.randn(5, 7).t())
    found = Weights(next(names), model, request.param)
    found.fill()
    found.bind()
    return found


@pytest.fixture
def integrity(weights):
    found = Integrity(weights)
    found.note()
    return found


def test_weights_that_are_derived_anew_are_no_change(weights, integrity):
    integrity.check()
    for tensor in weights.tensors.values():
        tensor.add_(1.0)
    integrity.note()
    integrity.check()


@pytest.mark.parametrize("name", ["0.weight", "1.bias"])
def test_an_operation_in_place_is_found_with_the_name_of_the_parameter(weights, integrity, name):
    with torch.no_grad():
        weights.parameters[name][0].mul_(0.5)
    with pytest.raises(ConfigError, match=f"'{name}' was changed outside a step"):
        integrity.check()


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.bias"])
def test_a_change_that_goes_around_autograd_is_found_too(weights, integrity, name):
    weights.parameters[name].data.mul_(0.5)
    with pytest.raises(ConfigError, match=f"'{name}' was changed outside a step"):
        integrity.check()


def test_the_last_element_counts(weights, integrity):
    weights.parameters["1.weight"].data[-1, -1] += 1.0
    with pytest.raises(ConfigError, match=r"'1.weight' was changed"):
        integrity.check()


def test_parameters_that_have_left_their_memory_are_found(weights, integrity):
    weights.parameters["1.bias"].data = weights.parameters["1.bias"].data.clone()
    with pytest.raises(ConfigError, match=r"'1.bias' no longer lies in the trainer's memory"):
        integrity.check()


def test_other_parameters_in_the_place_of_those_that_are_trained_are_found():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    places = Places(model, dict(model.named_parameters()))
    places.check()
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"the model has another parameter '0.weight'"):
        places.check()
