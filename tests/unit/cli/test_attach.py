"""Who may connect to a process's terminal."""

from types import SimpleNamespace

import pytest

from argosy.cli import attach as attaching
from argosy.cli.app import find_verb
from argosy.cli.arguments import parse
from argosy.cli.connection import Target
from argosy.errors import ConfigError


def test_without_a_terminal_of_its_own_attach_is_refused_with_what_can_be_done(monkeypatch):
    process = {"pid": 7, "state": "running", "tty": True, "role": "main", "index": 0}
    view = {"run": "r1", "name": "x", "roles": [{"role": "main", "processes": [process]}]}
    controller = SimpleNamespace(
        resolve=lambda word, to_act: (Target("r1", None, None), view), client=None
    )
    monkeypatch.setattr(attaching, "connect", lambda: controller)
    monkeypatch.setattr(attaching.os, "isatty", lambda descriptor: False)
    verb, rest = find_verb(["attach", "r1"])
    with pytest.raises(ConfigError, match="needs a terminal") as caught:
        attaching.attach(parse(verb, rest))
    assert "argosy logs -f r1" in caught.value.fix
