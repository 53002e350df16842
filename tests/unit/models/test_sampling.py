"""Drawing tokens: shares are right, limits hold, and rows do not depend on each other."""

import pytest
import torch

from argosy.errors import ConfigError
from argosy.models.sampling import Sampling, draw, uniform_rows

LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()[torch.tensor([2, 0, 3, 1])]  # of tokens 0..3
EVEN = (torch.arange(1000) + 0.5).double() / 1000


def counts(**sampling):
    drawn = draw(LOGITS.expand(1000, -1), EVEN, Sampling(**sampling))
    return drawn.bincount(minlength=4).tolist()


def test_tokens_are_drawn_in_their_shares():
    assert counts() == [150, 500, 100, 250]


def test_temperature_sharpens_and_zero_takes_the_likeliest():
    assert counts(temperature=0) == [0, 1000, 0, 0]
    assert counts(temperature=0.5)[1] > 650
    assert counts(temperature=100.0)[1] < 260


def test_top_k_keeps_the_likeliest_in_their_shares():
    assert counts(top_k=2) == [0, 667, 0, 333]
    assert counts(top_k=1) == [0, 1000, 0, 0]
    assert counts(top_k=99) == counts()


def test_top_p_keeps_the_smallest_set_that_reaches_the_share():
    assert counts(top_p=0.4) == [0, 1000, 0, 0]
    assert counts(top_p=0.7) == [0, 667, 0, 333]
    assert counts(top_p=0.76)[2] == 0
    assert counts(top_p=0.76)[0] > 0
    assert counts(top_k=3, top_p=0.7) == [0, 667, 0, 333]


def test_the_ends_of_the_unit_interval_give_tokens_that_are_possible():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=3)):
        assert set(draw(logits, ends, sampling).tolist()) <= {1, 2}


def test_numbers_of_a_row_depend_on_seed_and_row_alone():
    wide, narrow = uniform_rows(5, 4, 50), uniform_rows(5, 2, 20)
    assert torch.equal(wide[:2, :20], narrow)
    assert len({float(x) for x in wide[:, 0]}) == 4
    assert not torch.equal(uniform_rows(6, 2, 20), narrow)
    assert 0.4 < float(wide.mean()) < 0.6


def test_the_default_generator_is_left_alone():
    before = torch.get_rng_state()
    uniform_rows(1, 2, 3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 2.0},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        Sampling(**wrong)
