"""Settings and states that mean nothing are refused by name, before anything is written."""

import pytest
import torch

from argosy.checkpoint import Checkpointer, Keep, Rules, Writing
from argosy.errors import ConfigError
from argosy.train.checkpoints import Checkpoints


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Rules(strict=False), "strict = False"),
        (lambda: Rules(strict="subsets"), "strict = 'subsets'"),
        (lambda: Rules(rename=[("(", "")]), r"rename has \('\(', ''\)"),
        (lambda: Rules(rename=["backbone."]), "rename has 'backbone.'"),
        (lambda: Rules(rename=[("(a)", r"\2")]), "rename has"),
        (lambda: Writing(snapshot="fast"), "snapshot = 'fast'"),
        (lambda: Writing(threads=0), "threads = 0"),
        (lambda: Writing(bytes_per_second=-1), "bytes_per_second = -1"),
        (lambda: Writing(deadline_seconds=0), "deadline_seconds = 0"),
        (lambda: Checkpoints(every=1.5), "every 1.5 steps"),
        (lambda: Checkpoints(keep=3), "keep = 3 is no Keep"),
        (lambda: Checkpoints(attachments={"config.json": "{}"}), "is str, not bytes"),
        (lambda: Checkpoints(attachments={"../x": b""}), "cannot be attached as '../x'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, what):
    with pytest.raises(ConfigError, match=what) as caught:
        make()
    assert caught.value.fix


@pytest.mark.parametrize(
    ("state", "more", "what"),
    [
        (torch.nn.Linear(2, 2), {}, "the state is a Linear, not a dict"),
        ([torch.ones(1)], {}, "the state is a list, not a dict"),
        ({1: torch.ones(1)}, {}, "the key 1 cannot be used"),
        ({"x": 1}, {"metrics": {"loss": "low"}}, "the metric .loss. is not one number"),
        ({"x": 1}, {"attachments": {"config.json": "{}"}}, "'config.json' is str, not bytes"),
        ({"x": 1}, {"attachments": {"../x": b""}}, "cannot be attached as '../x'"),
        ({"x": 1}, {"attachments": {1: b""}}, "cannot be attached as 1"),
        ({"x": 1}, {"attachments": [b""]}, "attachments are a list"),
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_states_that_cannot_be_saved_are_refused(tmp_path, state, more, what, wait):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ConfigError, match=what):
            checkpointer.save(1, state, wait=wait, **more)
        assert checkpointer.steps() == []


@pytest.mark.parametrize("name", ["objects", "peers", "writing"])
def test_what_is_no_setting_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=f"{name} = 'x' is no "):
        Checkpointer(tmp_path, **{name: "x"})


def test_a_load_into_no_dict_is_refused_and_nothing_is_called_damaged(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": torch.nn.Linear(2, 2)})
        with pytest.raises(ConfigError, match="the state is a Linear"):
            checkpointer.load(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("keep", [3, Keep(last="3")])
def test_a_keep_that_is_none_is_refused(tmp_path, keep):
    with pytest.raises(ConfigError):
        Checkpointer(tmp_path, keep=keep)
