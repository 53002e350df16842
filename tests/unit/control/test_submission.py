"""Waiting for a cluster that is being started."""

from types import SimpleNamespace

from argosy.control import submission


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
