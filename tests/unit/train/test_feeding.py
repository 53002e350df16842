import itertools

import pytest
import torch
from torch import nn

from argosy.errors import ConfigError
from argosy.train.feeding import Feeding, Pantry, Unfed, read

prefixes = (f"feeding-{number}" for number in itertools.count())


@pytest.fixture
def pantries():
    """Those of two ranks."""
    prefix = next(prefixes)
    return [Pantry(prefix, 4, seed=0) for _ in range(2)]


@pytest.fixture
def model():
    return nn.Dropout(0.5)


def test_what_one_rank_has_made_is_what_another_computes_from(pantries, model):
    calls = []

    def produce(lane):
        calls.append((lane, model.training, torch.is_grad_enabled()))
        return {"inputs": torch.randn(3), "number": torch.tensor(len(calls))}

    feeding = Feeding(produce=produce)
    model.train()
    first = pantries[0].batch(feeding, model, (7, 5, 6), 2)
    again = pantries[1].batch(feeding, model, (7, 5, 6), 2)
    assert calls == [(2, False, False)]
    assert model.training
    assert torch.equal(first.inputs, again.inputs)
    assert (again.index, again.lane) == (6, 2)
    later = pantries[1].batch(feeding, model, (8, 6, 7), 2)
    assert later.number == 2


def test_a_batch_may_be_larger_than_the_one_before(pantries, model):
    for step, size in enumerate((10, 100_000, 10)):
        feeding = Feeding(produce=lambda lane, size=size: {"inputs": torch.arange(size)})
        pantries[0].batch(feeding, model, (step, step, step), 0)
        found = pantries[1].batch(feeding, model, (step, step, step), 0)
        assert torch.equal(found.inputs, torch.arange(size))


def test_recorded_batches_can_be_read_again(pantries, model, tmp_path):
    produce = lambda lane: {"inputs": torch.full((2,), float(lane))}  # noqa: E731
    pantries[0].batch(Feeding(produce=produce, directory=tmp_path), model, (0, 3, 3), 1)
    assert torch.equal(read(tmp_path, 3, 1)["inputs"], torch.ones(2))
    with pytest.raises(ConfigError, match="step 4, lane 1 is not recorded"):
        read(tmp_path, 4, 1)


@pytest.mark.parametrize("made", [None, [1, 2], {"inputs": [1, 2]}])
def test_anything_but_named_tensors_is_refused(pantries, model, made):
    with pytest.raises(ConfigError, match=r"step.feed\(\) was given"):
        pantries[0].batch(Feeding(produce=lambda lane: made), model, (0, 0, 0), 0)


def test_a_trainer_without_data_says_so_when_a_step_is_not_fed():
    with pytest.raises(ConfigError, match="this trainer has no data"):
        Unfed(lanes=4, seed=0).batch(0, 0)
