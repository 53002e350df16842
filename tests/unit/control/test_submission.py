"""What may be submitted from Python, and waiting for a cluster that is being started."""

from types import SimpleNamespace

import pytest

import argosy
from argosy import RoleSpec, RunSpec
from argosy.control import submission
from argosy.errors import ConfigError


def one(**role):
    return RunSpec(roles={"m": RoleSpec(**role)})


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (5, "made of 5"),
        (None, "made of None"),
        (one(command="true"), "got `str` at `roles.m.command`"),
        (one(command=[1, 2]), "got `int` at `roles.m.command[0]`"),
        (one(command=["true"], count="3"), "at `roles.m.count`"),
        (one(command=["true"], ready={"fil": "x"}), "unknown key `roles.m.ready.fil`"),
        (RunSpec(roles={"m": {"comand": ["true"]}}), "unknown key `roles.m.comand`"),
        (RunSpec(roles=3), "Expected `object`"),
        (one(command=[object()]), "cannot be read"),
        (RunSpec(roles={"m": RoleSpec(command=["true"])}, array=3), "array = 3"),
        (one(command=["true"], secrets=["KEY"]), "'KEY' was not given"),
    ],
)
def test_objects_of_our_classes_are_checked_like_any_other_spec(spec, says):
    with pytest.raises(ConfigError) as caught:
        argosy.submit(spec)
    assert says in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(("secrets", "says"), [({"KEY": "x"}, "no role"), ({"KEY": 5}, "is int")])
def test_a_secret_is_a_text_that_a_role_names(secrets, says):
    with pytest.raises(ConfigError, match=says):
        argosy.submit(one(command=["true"]), secrets=secrets)


def test_a_cluster_is_up_when_its_agent_has_come(monkeypatch):
    answers = iter([OSError("nobody listens"), {"keeper": ""}, {"keeper": ""}, {"keeper": "k1"}])

    def get(_):
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(submission, "ControllerClient", lambda _: SimpleNamespace(get=get))
    assert submission.await_controller(None) == {"keeper": ""}
    assert submission.await_controller(None, with_host=True) == {"keeper": "k1"}
