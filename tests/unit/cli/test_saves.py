"""A person who ends a run is told what it has saved, also on the way, and how to go on with it."""

import io
import json

import pytest

from argosy.cli import stop as stopping
from argosy.cli.app import find_verb
from argosy.cli.arguments import parse
from argosy.cli.connection import Target
from argosy.cli.paint import Paint
from argosy.cli.saves import newest_save
from argosy.cli.why import explain, explain_failure

BOUNDED = {"kind": "gang.bounded", "role": "train"}


@pytest.fixture
def view(tmp_path):
    lost = "argosy kill; nothing was saved at its end"
    view = {"run": "r1", "name": "job", "state": "ended", "outcome": "stopped", "reason": lost}
    view |= {"directory": str(tmp_path), "roles": [], "exit_code": 137}
    return view


def events_of(*more):
    role = {"script": "train.py", "gang": True, "count": 2, "restart": "transient"}
    facts = [
        {"kind": "run.submitted", "run": "r1", "spec": {"roles": {"train": role}}},
        {"kind": "attempt.planned", "attempt": "a", "role": "train", "index": 0, "number": 0},
        *more,
    ]
    return [{"seq": n, "at": 1.0 * n, "fact": fact} for n, fact in enumerate(facts, 1)]


def keep(tmp_path, *steps):
    for step in steps:
        (tmp_path / "checkpoints" / f"step-{step:09d}").mkdir(parents=True)


def test_the_newest_of_those_on_disk_and_those_told_of_counts(tmp_path, view):
    told = {"kind": "run.saved", "attempt": "a", "step": 130}
    told["path"] = f"{tmp_path}/checkpoints/step-000000130"
    assert newest_save(view, events_of(BOUNDED)) is None
    assert newest_save(view, events_of(BOUNDED, told)).step == 130
    keep(tmp_path, 127, 133)
    (tmp_path / "checkpoints" / ".staging-000000140-x").mkdir()
    assert newest_save(view, events_of(BOUNDED, told)).step == 133
    assert newest_save(view, events_of()) is None, "without a trainer nothing can be gone on with"


class Answers:
    """A controller with one run that has ended."""

    client = None

    def __init__(self, view, events):
        self._view, self._events = view, events

    def get(self, path):
        return {"events": self._events}

    def resolve(self, text, *, to_act):
        return Target("r1", None, None), self._view


def test_the_end_of_a_run_names_its_newest_checkpoint(tmp_path, view, monkeypatch, capsys):
    keep(tmp_path, 133)
    events = events_of(BOUNDED)
    monkeypatch.setattr(stopping, "connect", lambda: Answers(view, events))

    def kill(*words):
        verb, rest = find_verb(["kill", "r1", *words])
        assert stopping.kill(parse(verb, rest)) == 0
        return capsys.readouterr().out

    path = f"{tmp_path}/checkpoints/step-000000133"
    command = f"argosy run -n 2 train.py -- --resume {tmp_path}"
    assert kill() == (
        "run r1 has already stopped; nothing was saved at its end; "
        f"step 133 is saved in {path}\n  go on: {command}\n"
    )
    saved = {"step": 133, "path": path, "command": command}
    assert json.loads(kill("--json")) == {**view, "saved": saved}
    for text in (
        "\n".join(explain(view, events, Paint(io.StringIO()))),
        explain_failure(Answers(view, events), view),
    ):
        assert f"step 133 is saved in {path}\n" in text
        assert f"go on: {command}\n" in text
    view["outcome"] = "succeeded"
    assert "go on" not in kill()


def test_after_a_change_of_size_the_run_is_gone_on_with_at_the_newest(tmp_path, view):
    keep(tmp_path, 5)
    resized = [{"kind": "gang.resized", "role": "train", "size": size} for size in (6, 3)]
    assert newest_save(view, events_of(BOUNDED, *resized)).command.startswith("argosy run -n 3 ")
