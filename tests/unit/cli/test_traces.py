"""Commands that only look, where there is no cluster: nothing is there afterwards."""

import os

import pytest

from argosy.cli.app import main
from argosy.control import hostchecks


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.setenv("ARGOSY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("verb", ["ps", "status", "why", "logs", "events", "tree", "queue", "stop"])
def test_looking_at_no_cluster_leaves_no_trace(given, verb, capsys):
    assert main([verb]) in (3, 69)
    assert os.listdir(given) == []


def test_taking_down_what_never_was_leaves_no_trace(given, capsys):
    assert main(["down"]) == 0
    assert main(["down", "--force"]) == 0
    assert "no cluster was running" in capsys.readouterr().out
    assert os.listdir(given) == []


def test_the_doctor_leaves_no_trace_of_a_home(given):
    assert hostchecks.check_home().state == "ok"
    assert hostchecks.check_disk().state != "broken"
    assert os.listdir(given) == []
