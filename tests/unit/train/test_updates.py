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


class Told(torch.optim.AdamW):
    """Remembers the shapes that it has stepped with."""

    def step(self, closure=None):
        self.seen = [
            *getattr(self, "seen", []),
            *(p.shape for g in self.param_groups for p in g["params"]),
        ]
        return super().step(closure)


def test_parameters_that_are_alike_are_tried_once_and_all_have_their_fields():
    given = {f"{n}.weight": torch.nn.Parameter(torch.ones(3, 2)) for n in range(4)}
    given["4.weight"] = torch.nn.Parameter(torch.ones(5))
    given["5.weight"] = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    updater = Updater("", lambda params: Told(params, lr=0.1), given)
    fields = updater.probe()
    assert updater.optimizer.seen == [(3, 2), (5,), (3, 2)]
    for name, parameter in given.items():
        own = {field.key: field for field in fields if field.name == name}
        assert list(own) == ["step", "exp_avg", "exp_avg_sq"]
        assert own["exp_avg"].shape == tuple(parameter.shape)
        assert f"torch.{own['exp_avg'].dtype}" == str(parameter.dtype)


def test_groups_may_keep_different_things_for_parameters_that_are_alike():
    def factory(params):
        plain, more = params
        return torch.optim.AdamW([{"params": [plain]}, {"params": [more], "amsgrad": True}])

    given = {name: torch.nn.Parameter(torch.ones(3)) for name in ("plain", "more")}
    found = [(field.name, field.key) for field in Updater("", factory, given).probe()]
    assert ("more", "max_exp_avg_sq") in found
    assert ("plain", "max_exp_avg_sq") not in found
