"""Questions to a cluster whose parts are being replaced, or cannot be reached."""

import os
from types import SimpleNamespace

import pytest

from argosy.control import stalled
from argosy.control.asking import ControllerClient
from argosy.control.home import Cluster
from argosy.control.keeper.census import Seen, look_at
from argosy.control.keeper.records import Records
from argosy.errors import ClusterError


class Asked(ControllerClient):
    """Answers what it is told to, errors too."""

    def __init__(self, cluster, *answers, return_seconds=60.0):
        super().__init__(cluster, return_seconds=return_seconds)
        self.answers = list(answers)

    def ask(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    def get(self, target):
        return self.ask()


@pytest.fixture
def cluster(tmp_path):
    return Cluster(str(tmp_path), str(tmp_path / "runtime"))


@pytest.fixture
def parts(monkeypatch):
    """The parts that live, with the ages they have."""

    def are(**ages):
        found = {name: SimpleNamespace(state="S", age_seconds=age) for name, age in ages.items()}
        monkeypatch.setattr(stalled, "parts_of", lambda _: found)

    return are


ABSENT, REFUSED, CUT = FileNotFoundError(), ConnectionRefusedError(), ConnectionResetError()


@pytest.mark.parametrize("living", [{"agent": 500.0}, {"agent": 500.0, "keeper": 0.1}])
def test_while_a_keeper_is_replaced_everything_is_asked_again(cluster, parts, living):
    parts(**living)
    client = Asked(cluster, ABSENT, REFUSED, {"x": 1})
    assert client.reach(client.ask) == {"x": 1}


def test_only_what_reads_is_asked_again_when_the_answer_breaks_off(cluster, parts):
    parts(keeper=500.0, agent=500.0)
    client = Asked(cluster, CUT, {"x": 1})
    assert client.reach(client.ask, is_reading=True) == {"x": 1}
    client = Asked(cluster, CUT, {"x": 1})
    with pytest.raises(ClusterError, match="went away"):
        client.reach(client.ask)


def test_a_keeper_that_lives_without_its_sockets_is_not_waited_for(cluster, parts):
    parts(keeper=500.0, agent=500.0, controller=500.0)
    client = Asked(cluster, ABSENT, {"x": 1})
    with pytest.raises(ClusterError, match="nobody listens") as caught:
        client.reach(client.ask, is_reading=True)
    assert "down --force" in caught.value.fix
    with pytest.raises(ClusterError, match="nobody listens"):
        Asked(cluster, ABSENT).status()


def test_nobody_is_waited_for_who_is_dead_and_nobody_for_ever(cluster, parts):
    parts()
    client = Asked(cluster, ABSENT, {"x": 1})
    with pytest.raises(ClusterError, match="no cluster is running"):
        client.reach(client.ask)
    assert Asked(cluster, REFUSED, {"x": 1}).status() is None
    parts(agent=500.0)
    client = Asked(cluster, ABSENT, return_seconds=0.05)
    with pytest.raises(ClusterError, match="nobody listens"):
        client.reach(client.ask)


def test_a_part_that_is_stopped_brings_nobody_back(cluster, monkeypatch):
    found = {"agent": SimpleNamespace(state="T", age_seconds=500.0)}
    monkeypatch.setattr(stalled, "parts_of", lambda _: found)
    assert not stalled.is_alive(cluster)
    assert not stalled.is_succeeding(cluster)


def test_parts_are_those_of_the_record_and_know_their_age(cluster):
    own = look_at(os.getpid())
    record = {"pid": own.pid, "start": own.start, "services": {"agent": {"pid": 1, "start": 7}}}
    Records(cluster.directory).write_keeper(record)
    assert stalled.parts_of(cluster) == {"keeper": own}
    assert 0 < own.age_seconds < 86_400
    assert isinstance(own, Seen)
