import pytest
import torch
from torch import nn

from argosy.errors import ConfigError
from argosy.train.assembly import changing_buffers
from argosy.train.stillness import Stillness


class Masked(nn.Module):
    """Batch statistics, a mask, a large table and a count, all of them part of the state; and a cache that is not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("table", torch.zeros(300, 300))
        self.register_buffer("offset", torch.tensor(1 << 30))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        return self.norm(inputs)


@pytest.fixture
def model():
    return Masked()


def test_what_one_pass_changes_is_found_and_put_back(model):
    def forward():
        inputs = torch.randn(8, 4, requires_grad=True)
        torch.autograd.grad(model(inputs).square().sum(), inputs)  # as a penalty on gradients does

    assert list(changing_buffers(model, forward)) == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert not model.norm.running_mean.any()


def test_where_it_is_not_known_all_count_that_can_travel_with_gradients(model):
    found = changing_buffers(model, None)
    assert "table" in found
    assert "norm.running_mean" in found
    assert not {"mask", "offset", "cache"} & set(found)


@pytest.mark.parametrize("name", ["mask", "table", "offset", "norm.running_mean"])
def test_a_change_that_was_not_expected_is_refused(model, name):
    still = Stillness(model, {"norm.num_batches_tracked"})
    still.note()
    still.check(3)
    model.get_buffer(name).fill_(3)
    with pytest.raises(ConfigError, match=f"buffer '{name}' was changed by the loss in step 3"):
        still.check(3)


def test_what_is_expected_private_or_set_between_blocks_is_no_change(model):
    still = Stillness(model, {"norm.running_mean"})
    model.table.fill_(2.0)
    still.note()
    model.norm.running_mean.fill_(1.0)
    model.cache.fill_(1.0)
    still.check(0)
