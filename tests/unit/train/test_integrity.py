import itertools

import pytest
import torch
from torch import nn

from argosy.errors import ConfigError
from argosy.train.integrity import Integrity
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
