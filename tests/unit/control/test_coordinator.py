from __future__ import annotations

import pytest

from argosy.config.spec import RoleSpec, RunSpec, Submission
from argosy.control.coordinator import Coordinator
from argosy.errors import ConfigError, NotFoundError
from argosy.protocol.facts import (
    AttemptExited,
    AttemptStarted,
    CommandAccepted,
    CommandDone,
    Note,
    RunAdmitted,
    RunEnded,
)
from argosy.protocol.messages import (
    Acknowledge,
    Hello,
    Observed,
    Report,
    Wants,
    Welcome,
)
from argosy.testing.scripted import ScriptedHost


def task(**more):
    return RoleSpec(command=["true"], **more)


def test_a_submission_is_answered_with_its_outcome_in_the_log():
    host = ScriptedHost()
    host.submit({"a": task()})
    [accepted], [done] = host.facts(CommandAccepted), host.facts(CommandDone)
    assert accepted.command == done.command
    assert done.outcome == "ok"


def test_a_wrong_spec_is_refused_and_leaves_nothing():
    host = ScriptedHost()
    before = len(host.log)
    with pytest.raises(ConfigError):
        host.submit({"a": RoleSpec(command=["x"], count=0)})
    assert len(host.log) == before
    assert not host.coordinator.runs


def test_a_secret_that_was_not_given_is_refused():
    host = ScriptedHost()
    with pytest.raises(ConfigError, match="TOKEN"):
        host.submit({"a": task(secrets=["TOKEN"])})


def test_values_of_the_environment_never_enter_the_log():
    coordinator = Coordinator(runs_directory="/runs")
    submission = Submission(spec=RunSpec(roles={"a": task()}), env={"PASSWORD": "hunter2"})
    _runs, outputs = coordinator.submit(1.0, submission, env_blob="digest", secret_blobs={})
    assert "hunter2" not in str(outputs)
    assert "PASSWORD" in str(outputs)


def test_values_of_a_roles_variables_travel_in_its_blob_and_never_enter_the_log():
    coordinator = Coordinator(runs_directory="/runs")
    hello = Hello(version=1, host="h", keeper="k", pid=1, cpus=1, memory_bytes=1, alive=[])
    coordinator.receive(0.0, "h", hello)
    own = {"PASSWORD": "hunter2", "ARGOSY_RUN_NAME": "mine"}
    roles = {"a": task(env=own), "b": task()}
    _runs, outputs = coordinator.submit(
        1.0,
        Submission(spec=RunSpec(roles=roles)),
        env_blob="shell",
        secret_blobs={},
        role_env_blobs={"a": "shell-and-a"},
    )
    assert "hunter2" not in str(outputs)
    assert "PASSWORD" in str(outputs)
    [wants] = [message for _, message in outputs.messages if isinstance(message, Wants)]
    a, b = (want.launch for want in wants.wants)
    assert (a.env_blob, b.env_blob) == ("shell-and-a", "shell")
    # The role's own value must win over the runtime's.
    assert "ARGOSY_RUN_NAME" not in a.env
    assert "ARGOSY_RUN_NAME" in b.env


def test_a_run_waits_until_there_is_a_host():
    coordinator = Coordinator(runs_directory="/runs")
    submission = Submission(spec=RunSpec(roles={"a": task()}))
    [run], outputs = coordinator.submit(1.0, submission, env_blob="", secret_blobs={})
    assert coordinator.run_view(run).waiting == "waits for a host"
    hello = Hello(version=1, host="h", keeper="k", pid=1, cpus=1, memory_bytes=1, alive=[])
    outputs = coordinator.receive(2.0, "h", hello)
    assert any(isinstance(event.fact, RunAdmitted) for event in outputs.events)
    [wants] = [message for _, message in outputs.messages if isinstance(message, Wants)]
    assert len(wants.wants) == 1


def test_an_array_becomes_that_many_runs_with_names_and_indices():
    host = ScriptedHost(cpus=2)
    host.submit({"a": task(cpu_request=1.0)}, name="sweep", array=5, queued=True)
    names = [view.name for view in host.coordinator.runs_view()]
    assert names == [f"sweep[{index}]" for index in reversed(range(5))]
    assert host.coordinator.counts == {"queued": 3, "running": 2, "ended": 0}
    first = next(iter(host.wants.values()))
    assert first.launch.env["ARGOSY_ARRAY_INDEX"] == "0"


def test_a_queued_run_that_is_stopped_was_cancelled():
    host = ScriptedHost(cpus=1)
    host.submit({"a": task(cpu_request=1.0)}, queued=True)
    host.submit({"a": task(cpu_request=1.0)}, queued=True)
    command = host.stop()
    assert host.ended.outcome == "cancelled"
    assert host.facts(CommandDone)[-1].command == command
    assert len(host.coordinator.queue) == 0


def test_many_runs_are_stopped_in_one_decision_and_none_that_waits_is_started():
    host = ScriptedHost(cpus=1, keep_ended=10)
    ended = host.submit({"a": task(cpu_request=1.0)}, name="lot", queued=True)
    host.start()
    host.exit("a.0.0", code=0)
    other = host.submit({"a": task(cpu_request=1.0)}, name="other", queued=True)
    host.start()
    host.submit({"a": task(cpu_request=1.0)}, name="lot", array=50, queued=True)
    same = host.submit({"a": task(cpu_request=1.0)}, name="lot", queued=True)
    words = {"lot", other, ended, "nothing"}
    asked, outputs = host.coordinator.stop_runs(host.now, words, hard=False, reason="enough")
    host.take(outputs)
    assert [each.run for each in asked if not each.was_queued] == [other]
    assert len(asked) == 52
    assert asked[-1].run == same
    assert len({each.command for each in asked}) == 52
    assert host.coordinator.counts == {"queued": 0, "running": 1, "ended": 52}
    assert len(host.facts(RunAdmitted)) == 2
    host.run = other
    host.exit("a.0.0", signal=15)
    assert (host.ended.outcome, host.ended.reason) == ("stopped", "enough")
    assert {fact.command for fact in host.facts(CommandDone)} >= {each.command for each in asked}
    assert host.coordinator.stop_runs(host.now, None, hard=True, reason="")[0] == []


def test_more_runs_than_rounds_are_stopped_in_one_decision(monkeypatch):
    host = ScriptedHost(cpus=1)
    host.submit({"a": task(cpu_request=1.0)}, name="lot", array=60, queued=True)
    monkeypatch.setattr("argosy.control.coordinator.MOST_ROUNDS", 20)
    asked, outputs = host.coordinator.stop_runs(host.now, {"lot"}, hard=False, reason="enough")
    host.take(outputs)
    assert len(asked) == 60
    assert host.coordinator.counts == {"queued": 0, "running": 1, "ended": 59}


def test_a_run_that_ends_makes_room_for_the_next_in_the_same_breath():
    host = ScriptedHost(cpus=1)
    first = host.submit({"a": task(cpu_request=1.0)}, queued=True)
    second = host.submit({"a": task(cpu_request=1.0)}, queued=True)
    host.run = first
    host.start()
    host.exit("a.0.0", code=0)
    assert host.facts(RunAdmitted)[-1].run == second


def test_the_same_observation_twice_is_one_fact_and_is_acknowledged_again():
    host = ScriptedHost()
    host.submit({"a": task()})
    data = {"pid": 1, "how": "exec"}
    name = f"{host.run}.a.0.0"
    observed = Observed(number=1, kind="started", attempt=name, run=host.run, data=data)
    report = Report(host="h", keeper="k1", observed=[observed])
    for _ in range(2):
        outputs = host.take(host.coordinator.receive(host.now, "h", report))
        assert ("h", Acknowledge(keeper="k1", number=1)) in outputs.messages
    assert len(host.facts(AttemptStarted)) == 1


def test_a_new_controller_knows_what_was_acknowledged_and_wants_the_same():
    host = ScriptedHost()
    host.submit({"a": task(), "b": task()})
    host.start()
    before = dict(host.wants)
    host.wants.clear()
    host.coordinator = Coordinator(runs_directory="/runs")
    for event in host.log:
        host.coordinator.replay(event)
    hello = Hello(version=1, host="h", keeper="k1", pid=1, cpus=4, memory_bytes=8 << 30, alive=[])
    outputs = host.take(host.coordinator.receive(host.now, "h", hello))
    assert outputs.events == []
    assert ("h", Welcome(version=1, keeper="k1", acknowledged=2)) in outputs.messages
    assert host.wants == before


def test_what_a_host_holds_of_ended_runs_is_released():
    host = ScriptedHost()
    host.submit({"a": task()})
    host.start()
    host.exit("a.0.0", code=0)
    leftover = f"{host.run}.a.0.0"
    host.wants.clear()
    host.reserves.clear()
    host.restart_controller()
    assert not host.wants
    host.hello(alive=[leftover, "rzzz.x.0.0"])
    assert host.wants[leftover].state == "gone"
    assert host.wants["rzzz.x.0.0"].state == "gone"


def test_late_word_of_a_replaced_keeper_changes_nothing():
    host = ScriptedHost()
    host.submit({"a": task(restart="transient")})
    host.start()
    old = host.keeper
    host.replace_keeper()
    host.advance(0.1)
    host.start()
    before = len(host.log)
    hello = Hello(version=1, host="h", keeper=old, pid=1, cpus=4, memory_bytes=8 << 30, alive=[])
    host.take(host.coordinator.receive(host.now, "h", hello))
    late = Observed(
        number=9, kind="exited", attempt=f"{host.run}.a.0.0", run=host.run, data={"code": 0}
    )
    report = Report(host="h", keeper=old, observed=[late])
    host.take(host.coordinator.receive(host.now, "h", report))
    assert len(host.log) == before
    assert host.coordinator.hosts["h"].keeper == host.keeper


def test_an_attempt_that_turns_up_after_its_end_is_ended_again():
    host = ScriptedHost()
    host.submit({"a": task()})
    host.report("exited", "a.0.0", error="told to end before it was started")
    host.report("started", "a.0.0", pid=1, how="exec")
    assert host.want("a.0.0").state == "gone"
    assert host.facts(Note)


def test_wants_are_sent_again_until_they_are_confirmed():
    host = ScriptedHost()
    host.submit({"a": task()})
    coordinator = host.coordinator
    at = coordinator.deadline()
    assert at is not None
    outputs = coordinator.tick(at)
    [(_, wants)] = outputs.messages
    assert [want.attempt for want in wants.wants] == [f"{host.run}.a.0.0"]
    report = Report(host="h", keeper="k1", wants_version=wants.version)
    coordinator.receive(at, "h", report)
    assert coordinator.deadline() is None


def test_commands_for_what_is_not_there_are_refused():
    host = ScriptedHost()
    run = host.submit({"a": task()})
    stop = host.coordinator.stop
    for target in ({"run": "r0"}, {"run": run, "role": "b"}, {"run": run, "role": "a", "index": 7}):
        with pytest.raises(NotFoundError):
            stop(1.0, hard=False, reason="", **target)
    with pytest.raises(NotFoundError):
        host.coordinator.find("nothing/here")


def test_a_stop_of_an_ended_run_is_done_at_once():
    host = ScriptedHost()
    host.submit({"a": task()})
    host.start()
    host.exit("a.0.0", code=0)
    command = host.stop()
    assert host.facts(CommandDone)[-1].command == command
    assert len(host.facts(RunEnded)) == 1


def test_views_name_every_process_and_its_state():
    host = ScriptedHost()
    run = host.submit({"a": task(), "b": task(after=["a"])}, name="shop")
    states = {p.role: (p.state, p.waiting) for p in host.coordinator.find("shop")}
    assert states == {"a": ("planned", ""), "b": ("waiting", "waits for role a to start")}
    host.start("a.0.0")
    [process] = host.coordinator.find(f"{run}/a/0")
    assert (process.state, process.pid) == ("running", 100)
    assert process.stdout == f"/runs/{run}/logs/a.0.0.out"
    view = host.coordinator.run_view(run)
    assert (view.state, view.outcome) == ("starting", "")
    assert host.coordinator.hosts_view()[0]["processes"] == 2


def test_an_interrupted_submission_gets_an_outcome():
    host = ScriptedHost()
    host.submit({"a": task()}, array=3)
    host.cut_log(1 + 2)
    host.restart_controller()
    assert host.facts(CommandDone)[-1].outcome.startswith("interrupted")
    assert not host.coordinator.pending


def test_a_lost_exit_is_recorded_once_even_if_the_log_was_cut_behind_the_new_keeper():
    host = ScriptedHost()
    host.submit({"a": task(restart="transient")})
    host.start()
    host.replace_keeper()
    cut = next(i for i, e in enumerate(host.log) if isinstance(e.fact, AttemptExited))
    host.cut_log(cut)
    host.restart_controller()
    assert len([f for f in host.facts(AttemptExited) if f.lost]) == 1


def test_stopping_a_part_of_a_queued_run_is_done_at_once():
    host = ScriptedHost(cpus=1)
    host.submit({"a": task(cpu_request=1.0)}, queued=True)
    host.submit({"a": task(cpu_request=1.0), "b": task()}, queued=True)
    command = host.stop("b")
    assert host.facts(CommandDone)[-1].command == command
    assert host.ended is None


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/python3", "jobs/train.py", "--x"], "train"),
        (["python", "-m", "pkg.train"], "pkg-train"),
        (["python3", "-c", "x"], "python3"),
        (["./a b.sh"], "a-b-sh"),
    ],
)
def test_a_run_without_a_name_is_called_after_its_program(command, name):
    host = ScriptedHost()
    run = host.submit({"a": RoleSpec(command=command)})
    assert host.coordinator.run_view(run).name == name
