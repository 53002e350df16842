import pytest
from torch import nn

from argosy.train.modes import Modes, evaluating


@pytest.fixture
def model():
    """With a part whose statistics are not to change."""
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    made[1].eval()
    return made


def modes_of(model):
    return [part.training for part in model]


def test_parts_have_their_modes_again_after_an_evaluation(model):
    with evaluating(model):
        assert modes_of(model) == [False, False, False]
    assert modes_of(model) == [True, False, True]


def test_a_model_that_was_evaluated_as_a_whole_trains_on_in_the_modes_of_before(model):
    modes = Modes(model)
    model.eval()
    modes.resume()
    assert model.training
    assert modes_of(model) == [True, False, True]


def test_what_user_code_changes_while_it_trains_counts(model):
    modes = Modes(model)
    model[1].train()
    model[2].eval()
    modes.resume()
    model.eval()
    modes.resume()
    assert modes_of(model) == [True, True, False]


def test_a_model_that_comes_in_evaluation_mode_is_trained_as_a_whole(model):
    model.eval()
    Modes(model)
    assert modes_of(model) == [True, True, True]
