"""Whoever takes a cluster down with its runs is told what they have saved; and all runs can be stopped at once."""

import json
from types import SimpleNamespace

import pytest

from argosy.cli import stop as stopping
from argosy.cli.app import find_verb, main
from argosy.cli.arguments import parse
from argosy.cli.farewell import Farewell, told
from argosy.errors import ForgottenError, NotFoundError

ROLE = {"script": "train.py", "gang": True, "count": 2, "restart": "transient"}


def view_of(tmp_path, run, *, gang):
    directory = tmp_path / run
    directory.mkdir()
    roles = [{"role": "train", "gang": gang, "processes": []}]
    return {"run": run, "name": f"n-{run}", "directory": str(directory), "roles": roles}


class Answers:
    """A controller with some runs that are alive."""

    client = None

    def __init__(self, views):
        self.views = views
        self.posted = []

    def get(self, path):
        if path.startswith("/v1/runs"):
            return {"runs": self.views}
        facts = [
            {"kind": "run.submitted", "spec": {"roles": {"train": ROLE}}},
            {"kind": "gang.bounded", "role": "train"},
        ]
        return {"events": [{"seq": 1, "at": 1.0, "fact": fact} for fact in facts]}

    def post(self, path, body):
        self.posted.append((path, body))
        asked = [{"run": view["run"], "was_queued": False} for view in self.views]
        return {"runs": asked}


def end(view, reason):
    fact = {"kind": "run.ended", "outcome": "stopped", "reason": reason}
    with open(f"{view['directory']}/end.json", "w", encoding="utf-8") as file:
        json.dump({"seq": 9, "at": 9.0, "fact": fact}, file)


def test_what_is_saved_while_the_cluster_ends_is_told(tmp_path):
    trained, lost, plain, gone = (
        view_of(tmp_path, run, gang=run != "r3") for run in ("r1", "r2", "r3", "r4")
    )
    farewell = Farewell(Answers([trained, lost, plain, gone]))
    step = tmp_path / "r1" / "checkpoints" / "step-000000014"
    step.mkdir(parents=True)
    for view in (trained, plain):
        end(view, "argosy down --force")
    end(lost, "argosy down --force; nothing was saved at its end")
    runs = farewell.ended()
    assert told(runs) == [
        "run r1 (n-r1) stopped",
        f"step 14 is saved in {step}",
        f"  go on: argosy run -n 2 train.py -- --resume {tmp_path / 'r1'}",
        "run r2 (n-r2) stopped; nothing was saved at its end",
        "run r3 (n-r3) stopped",
        "run r4 (n-r4) ended",
    ]
    assert runs[0].as_json()["saved"]["step"] == 14
    assert runs[2].as_json() == {
        "run": "r3",
        "name": "n-r3",
        "outcome": "stopped",
        "reason": "argosy down --force",
        "saved": None,
    }
    assert told(runs * 20)[-1] == "and 60 more runs ended"


def test_all_runs_are_asked_to_stop(tmp_path, monkeypatch, capsys):
    views = [view_of(tmp_path, run, gang=False) | {"state": "running"} for run in ("r1", "r2")]
    controller = Answers(views)
    monkeypatch.setattr(stopping, "connect", lambda: controller)
    verb, rest = find_verb(["stop", "--all", "--no-wait"])
    assert stopping.stop(parse(verb, rest)) == 0
    assert controller.posted == [("/v1/stop", {"runs": None, "reason": "argosy stop --all"})]
    assert capsys.readouterr().out.splitlines() == [
        "run r1 is being stopped",
        "run r2 is being stopped",
    ]
    assert main(["stop", "r1", "--all"]) == 64


def test_more_runs_than_are_listed_are_stopped_and_told(tmp_path, monkeypatch, capsys):
    """The oldest of thousands in the queue: cancelled, and forgotten, before anybody could look at them."""
    view = view_of(tmp_path, "r9", gang=False) | {"state": "queued", "outcome": ""}
    controller = Answers([view])
    controller.cluster = SimpleNamespace(runs=str(tmp_path))
    asked = [{"run": run, "name": "lot", "was_queued": True} for run in ("r1", "r9")]
    controller.post = lambda path, body: {"runs": asked}
    monkeypatch.setattr(stopping, "connect", lambda: controller)
    for words in (["--no-wait"], []):
        verb, rest = find_verb(["stop", "--all", *words])
        assert stopping.stop(parse(verb, rest)) == 0
        assert capsys.readouterr().out.splitlines() == ["run r1 cancelled", "run r9 cancelled"]


def test_a_run_that_is_forgotten_before_it_was_waited_for_is_told_by_its_directory(
    tmp_path, monkeypatch, capsys
):
    """More runs were stopped than the controller remembers."""
    view = view_of(tmp_path, "r1", gang=False) | {"state": "running", "outcome": ""}
    end(view, "argosy stop --all")
    controller = Answers([view])
    monkeypatch.setattr(stopping, "connect", lambda: controller)
    get = controller.get

    def get_what_is_known(path):
        if path.startswith("/v1/events"):
            raise ForgottenError("run r1 is not known any more")
        return get(path)

    controller.get = get_what_is_known

    def forgotten(handle):
        raise ForgottenError(f"run {handle.run} is not known any more")

    monkeypatch.setattr(stopping.RunHandle, "wait", forgotten)
    monkeypatch.setattr(stopping.RunHandle, "view", forgotten)
    verb, rest = find_verb(["stop", "--all"])
    assert stopping.stop(parse(verb, rest)) == 0
    assert capsys.readouterr().out.splitlines() == ["run r1 stopped"]


def test_without_a_name_the_run_that_is_helped_is_meant(tmp_path, monkeypatch, capsys):
    train, writer = (
        view_of(tmp_path, run, gang=False)
        | {"state": "running", "outcome": "", "submitted_at": at, "helps": helps}
        for run, at, helps in (("r1", 1.0, ""), ("r2", 2.0, "r1"))
    )
    for verb in ("stop", "kill"):
        controller = Answers([train, writer])
        monkeypatch.setattr(stopping, "connect", lambda controller=controller: controller)
        found, rest = find_verb([verb, "--no-wait"])
        assert getattr(stopping, verb)(parse(found, rest)) == 0
        assert [path for path, _ in controller.posted] == ["/v1/runs/r1/stop"]


def test_without_a_name_a_run_that_helps_one_that_has_ended_is_not_ended(tmp_path, monkeypatch):
    writer = view_of(tmp_path, "r2", gang=False)
    writer |= {"state": "running", "outcome": "", "submitted_at": 2.0, "helps": "r1"}
    controller = Answers([writer])
    monkeypatch.setattr(stopping, "connect", lambda: controller)
    verb, rest = find_verb(["kill"])
    with pytest.raises(NotFoundError, match="no run is alive") as caught:
        stopping.kill(parse(verb, rest))
    assert "r2 works for r1" in caught.value.fix
    assert not controller.posted
