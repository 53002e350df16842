"""Schedules are pure functions of the step."""

import pytest

from argosy.errors import ConfigError
from argosy.train import schedules


def test_cosine_warms_up_and_comes_down():
    factor = schedules.cosine(100, warmup=10, least=0.1)
    values = [factor(step) for step in range(101)]
    assert values[:10] == sorted(values[:10])
    assert values[0] > 0
    assert max(values) == pytest.approx(1.0)
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[-1] == pytest.approx(0.1)


def test_trapezoid_is_level_between_its_ends():
    factor = schedules.trapezoid(100, warmup=10, cooldown=20)
    assert all(factor(step) == 1.0 for step in range(10, 81))
    assert factor(90) == pytest.approx(0.5)
    assert factor(100) == 0.0


def test_beyond_the_end_nothing_is_negative():
    for factor in (schedules.cosine(10), schedules.trapezoid(10, cooldown=5)):
        assert factor(1000) == pytest.approx(0.0)


@pytest.mark.parametrize("arguments", [{"warmup": -1}, {"warmup": 60, "cooldown": 50}])
def test_what_does_not_fit_is_refused(arguments):
    with pytest.raises(ConfigError):
        schedules.trapezoid(100, **arguments)
