"""What an optimizer may keep, and where."""

import pytest
import torch

from argosy.errors import ConfigError
from argosy.train.updates import Updater


class Counting(torch.optim.SGD):
    """Counts its steps for all parameters together, as some optimizers without schedules do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def masters():
    return {"weight": torch.nn.Parameter(torch.ones(3, 2))}


def test_an_optimizer_that_keeps_a_number_for_all_parameters_of_a_group_is_refused():
    updater = Updater("", lambda params: Counting(params, lr=0.1), masters())
    with pytest.raises(ConfigError, match="changes 'k' of its groups"):
        updater.probe()


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_what_an_optimizer_keeps_for_each_parameter_is_found_without_touching_it(rate):
    given = masters()
    updater = Updater("", lambda params: torch.optim.AdamW(params, lr=rate), given)
    assert [field.key for field in updater.probe()] == ["step", "exp_avg", "exp_avg_sq"]
    assert torch.equal(given["weight"], torch.ones(3, 2))
    assert not updater.optimizer.state
