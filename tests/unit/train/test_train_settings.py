import pytest

from argosy.errors import ConfigError
from argosy.train.guards import Guard
from argosy.train.settings import Settings, resolve


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recovery": False, "guard": Guard(policy="rewind")}, "no version is kept to go back to"),
        ({"layout": "replicated", "guard": Guard(policy="rewind")}, 'layout="replicated"'),
        ({"mode": "quick"}, "mode = 'quick'"),
        ({"recover": False}, "no argument 'recover'"),
        ({"hang_seconds": 0.0}, "hang_seconds is not positive"),
        ({"guard": "rewind"}, "guard = 'rewind'"),
        ({"schedule": 0.1}, "schedule = 0.1"),
        ({"counts": {"loss": 1}}, "counts = "),
        ({"checkpoints": 500}, "checkpoints = 500"),
        ({"terms": "loss"}, "terms = 'loss'"),
    ],
)
def test_settings_that_do_not_go_together_or_are_unknown_are_refused_with_a_fix(given, said):
    with pytest.raises(ConfigError, match=said) as refusal:
        resolve(Settings(batch_size=8), given)
    assert refusal.value.fix


def test_recovery_is_on_unless_it_is_turned_off():
    assert Settings(batch_size=8).recovery
    assert not resolve(Settings(batch_size=8), {"recovery": False}).recovery
