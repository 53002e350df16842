"""Which run a person means, also when some have been forgotten."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest

from argosy.cli.connection import Controller
from argosy.cli.queue import cancel_runs
from argosy.config.spec import RoleSpec
from argosy.errors import ForgottenError, NotFoundError
from argosy.protocol.facts import RunSubmitted
from argosy.testing.scripted import ScriptedHost


class Answers(Controller):
    """Asks a coordinator in this process in the place of a socket."""

    def __init__(self, coordinator):
        self._coordinator = coordinator

    def get(self, target):
        parts = urlsplit(target)
        if parts.path != "/v1/runs":
            return msgspec.to_builtins(self._coordinator.run_view(parts.path.rpartition("/")[2]))
        query = parse_qs(parts.query)
        name, include_ended = query.get("name", [""])[0], query["all"] == ["1"]
        views = self._coordinator.runs_view(include_ended=include_ended, limit=10_000, name=name)
        return {"runs": msgspec.to_builtins(views)}

    def post(self, target, body):
        assert target == "/v1/stop"
        runs, _ = self._coordinator.stop_runs(
            1.0, set(body["runs"]), hard=False, reason=body["reason"]
        )
        return {"runs": msgspec.to_builtins(runs)}


@pytest.fixture(scope="module")
def host():
    """The first 40 of 50 runs are forgotten; ids of the others have two digits before the last four characters."""
    host = ScriptedHost(keep_ended=10)
    for _ in range(50):
        host.submit({"a": RoleSpec(command=["x"])})
        host.start()
        host.exit("a.0.0", code=0)
    return host


def test_the_beginning_of_an_id_that_looks_like_a_forgotten_run_is_still_understood(host):
    run = list(host.coordinator.runs)[-1]
    assert len(run) == 7
    with pytest.raises(ForgottenError):
        host.coordinator.run_view(run[:-1])  # as an id it would be one of the first runs
    assert Answers(host.coordinator).run(run[:-1])["run"] == run


def test_a_forgotten_run_is_called_so_and_not_unknown(host):
    gone = host.facts(RunSubmitted)[0].run
    with pytest.raises(ForgottenError, match=gone):
        Answers(host.coordinator).run(gone)
    with pytest.raises(NotFoundError, match="there is no run") as caught:
        Answers(host.coordinator).run("nothing")
    assert not isinstance(caught.value, ForgottenError)


def test_a_name_that_looks_like_the_id_of_a_forgotten_run_is_found(host):
    run = host.submit({"a": RoleSpec(command=["x"])}, name="r1abcd")
    assert Answers(host.coordinator).run("r1abcd")["run"] == run


def test_a_name_to_cancel_means_all_of_that_name_and_an_id_one_run():
    host = ScriptedHost(cpus=1)
    role = {"a": RoleSpec(command=["x"], cpu_request=1.0)}
    same = [host.submit(role, name="job", queued=True) for _ in range(3)]
    host.run = same[0]
    host.start()
    host.exit("a.0.0", code=0)
    other = host.submit(role, name="other", queued=True)
    host.submit(role, name="many", queued=True, array=2)
    controller = Answers(host.coordinator)

    def cancelled(word):
        return [run["run"] for run in cancel_runs(controller, word)]

    assert cancelled(other[:-1]) == [other], "the beginning of an id"
    assert cancelled(same[2]) == [same[2]]
    assert cancelled("job") == [same[1]], "what has not ended"
    assert len(cancelled("many")) == 2
    with pytest.raises(NotFoundError, match="already succeeded"):
        cancelled(same[0])
    with pytest.raises(NotFoundError, match="there is no run"):
        cancelled("nothing")


def test_runs_that_have_ended_are_told_in_true_words():
    host = ScriptedHost(cpus=1)
    role = {"a": RoleSpec(command=["x"], cpu_request=1.0)}
    first, second = (host.submit(role, name="job", queued=True) for _ in range(2))
    host.run = second
    host.stop()
    host.run = first
    host.start()
    host.exit("a.0.0", code=0)
    controller = Answers(host.coordinator)
    with pytest.raises(NotFoundError, match=r"^all 2 runs of job have already ended"):
        cancel_runs(controller, "job")
    with pytest.raises(NotFoundError, match=f"^run {second} has already been cancelled"):
        cancel_runs(controller, second)
    with pytest.raises(NotFoundError, match=f"^run {first} has already succeeded"):
        cancel_runs(controller, first)


def test_to_act_a_name_means_the_newest_run_that_is_alive_and_to_look_the_newest():
    host = ScriptedHost()
    older, newer = (host.submit({"a": RoleSpec(command=["x"])}, name="job") for _ in range(2))
    controller = Answers(host.coordinator)
    assert controller.resolve("job", to_act=True)[0].run == newer
    host.run = newer
    host.start()
    host.exit("a.0.0", code=0)
    assert controller.resolve("job/a/0", to_act=True)[0].run == older
    assert controller.resolve("", to_act=True)[0].run == older
    assert controller.resolve("job")[0].run == controller.resolve("")[0].run == newer
    assert controller.resolve(newer, to_act=True)[0].run == newer, "an id is that run"
    host.run = older
    host.start()
    host.exit("a.0.0", code=0)
    assert controller.resolve("job", to_act=True)[0].run == newer
    assert controller.resolve("", to_act=True)[0].run == newer


def test_a_run_without_a_first_cause_says_null_and_not_an_empty_text():
    host = ScriptedHost()
    run = host.submit({"a": RoleSpec(command=["x"])})
    controller = Answers(host.coordinator)
    assert controller.run(run)["first_cause"] is None
    host.start()
    host.exit("a.0.0", code=0)
    assert controller.run(run)["first_cause"] is None
    host.run = failed = host.submit({"a": RoleSpec(command=["x"])})
    host.start()
    host.exit("a.0.0", code=1)
    assert controller.run(failed)["first_cause"] == f"{failed}.a.0.0"
