from __future__ import annotations

import pytest

from argosy.config.spec import Backoff, Budget, Probe, RoleSpec
from argosy.control import runstate
from argosy.errors import InvariantError
from argosy.protocol.facts import (
    AttemptExited,
    AttemptPlanned,
    AttemptStarted,
    AttemptStopping,
    CommandDone,
    Event,
    PortsReserved,
    RunEnded,
    StopRequested,
)
from argosy.testing.scripted import ScriptedHost

QUICK = Backoff(first_seconds=1.0, jitter=0.0)


def task(**more):
    return RoleSpec(command=["true"], **more)


def test_a_run_succeeds_when_every_process_ends_well():
    host = ScriptedHost()
    host.submit({"a": task(count=2)})
    host.start()
    host.exit("a.0.0", code=0)
    assert host.ended is None
    host.exit("a.1.0", code=0)
    assert (host.ended.outcome, host.ended.exit_code) == ("succeeded", 0)


def test_a_temporary_process_that_fails_ends_the_run_with_its_code_and_stops_the_others():
    host = ScriptedHost()
    host.submit({"a": task(), "b": task()})
    host.start()
    host.exit("a.0.0", code=3)
    assert host.wanted("term") == ["b.0.0"]
    host.exit("b.0.0", signal=15)
    assert (host.ended.outcome, host.ended.exit_code) == ("failed", 3)
    assert host.ended.first_cause == f"{host.run}.a.0.0"
    assert "temporary" in host.ended.reason


@pytest.mark.parametrize(
    ("exit", "code"), [({"signal": 11}, 139), ({"signal": 9}, 137), ({"code": 2}, 2)]
)
def test_the_exit_code_of_a_failed_run_is_that_of_its_first_cause(exit, code):
    host = ScriptedHost()
    host.submit({"a": task()})
    host.start()
    host.exit("a.0.0", **exit)
    assert host.ended.exit_code == code


def test_a_command_that_cannot_be_started_ends_the_run_with_127():
    host = ScriptedHost()
    host.submit({"a": task()})
    host.report("exited", "a.0.0", error="No such file or directory: 'nope'")
    assert host.ended.exit_code == 127
    assert "could not be started" in host.ended.reason


def test_a_transient_process_is_restarted_after_a_failure_until_its_budget_is_spent():
    host = ScriptedHost()
    host.submit({"a": task(restart="transient", budget=Budget(user=2), backoff=QUICK)})
    for number in range(3):
        assert host.waiting() == [f"a.0.{number}"]
        host.start()
        host.exit(f"a.0.{number}", code=1)
        host.advance(60.0)
    assert host.ended.outcome == "failed"
    assert "budget of 2" in host.ended.reason
    reasons = [fact.reason.partition("; ")[2] for fact in host.facts(AttemptPlanned)[1:]]
    assert reasons == ["restart 1 of 2", "restart 2 of 2"]


def test_failures_older_than_the_period_are_forgotten():
    host = ScriptedHost()
    budget = Budget(user=1, period_seconds=100.0)
    host.submit({"a": task(restart="transient", budget=budget, backoff=QUICK)})
    for number in range(5):
        host.start()
        host.exit(f"a.0.{number}", code=1)
        host.advance(101.0)
    assert host.ended is None


def test_each_failure_class_has_its_own_budget():
    host = ScriptedHost()
    host.submit({"a": task(restart="transient", budget=Budget(user=0, host=5), backoff=QUICK)})
    for number in range(4):
        host.start()
        host.exit(f"a.0.{number}", signal=9)
        host.advance(5.0)
    assert host.ended is None
    host.start()
    host.exit("a.0.4", code=1)
    assert host.ended.outcome == "failed"


def test_restarts_back_off_exponentially_and_long_lives_reset_it():
    host = ScriptedHost()
    backoff = Backoff(first_seconds=1.0, most_seconds=10.0, jitter=0.0)
    host.submit({"a": task(restart="transient", budget=Budget(user=50), backoff=backoff)})
    for number, wait in enumerate([1.0, 2.0, 4.0, 8.0, 10.0, 10.0]):
        host.start()
        host.exit(f"a.0.{number}", code=1)
        host.advance(wait - 0.01)
        assert host.waiting() == [], number
        assert "restarts in" in host.coordinator.run_view(host.run).waiting
        host.advance(0.02)
        assert host.waiting() == [f"a.0.{number + 1}"]
    host.start()
    host.advance(11.0)
    host.exit("a.0.6", code=1)
    host.advance(1.01)
    assert host.waiting() == ["a.0.7"]


def test_jitter_is_bounded_and_the_same_in_a_replay():
    plans = []
    for _ in range(2):
        host = ScriptedHost()
        backoff = Backoff(first_seconds=10.0, jitter=0.2)
        host.submit({"a": task(restart="transient", backoff=backoff)})
        host.start()
        host.exit("a.0.0", code=1)
        begin = host.now
        host.advance(20.0)
        plan = [e for e in host.log if isinstance(e.fact, AttemptPlanned)][-1]
        assert 8.0 <= plan.at - begin <= 12.0
        plans.append(plan.at)
    assert plans[0] == plans[1]


def test_a_program_that_shows_progress_is_given_up_when_it_makes_none():
    host = ScriptedHost()
    budget = Budget(user=100, no_progress=3)
    host.submit({"a": task(restart="transient", budget=budget, backoff=QUICK)})
    host.start()
    host.report("progressed", "a.0.0", step=5)
    host.exit("a.0.0", code=1)
    for number in range(1, 4):
        host.advance(60.0)
        host.start()
        host.exit(f"a.0.{number}", code=1)
    assert "without progress" in host.ended.reason


def test_a_permanent_helper_is_restarted_and_stopped_when_the_work_is_done():
    host = ScriptedHost()
    host.submit({"db": task(restart="permanent", backoff=QUICK), "work": task()})
    host.start()
    host.exit("db.0.0", code=0)
    host.advance(2.0)
    assert host.waiting() == ["db.0.1"]
    host.start()
    host.exit("work.0.0", code=0)
    assert host.wanted("term") == ["db.0.1"]
    assert host.ended is None
    host.exit("db.0.1", signal=15)
    assert host.ended.outcome == "succeeded"


def test_a_run_of_permanent_roles_lives_until_it_is_stopped():
    host = ScriptedHost()
    host.submit({"db": task(restart="permanent")}, service=True)
    host.start()
    host.advance(1e6)
    assert host.ended is None
    command = host.stop()
    assert not host.facts(CommandDone)[1:]
    host.exit("db.0.0", signal=15)
    assert host.ended.outcome == "stopped"
    assert host.facts(CommandDone)[-1].command == command


@pytest.mark.parametrize("exit", [{"code": 3}, {"code": 0}, {"signal": 9}, {"signal": 15}])
def test_what_ends_in_a_service_is_started_again_and_again(exit):
    host = ScriptedHost()
    host.submit({"web": task()}, service=True)
    for number in range(12):
        host.start()
        host.exit(f"web.0.{number}", **exit)
        assert host.ended is None
        host.advance(60.0)
        assert host.waiting() == [f"web.0.{number + 1}"]


def test_a_service_that_fails_for_a_whole_day_is_still_started_again():
    host = ScriptedHost()
    host.submit({"web": task()}, service=True)
    for number in range(1100):
        host.start()
        host.exit(f"web.0.{number}", code=3)
        host.advance(60.0)
    assert host.ended is None
    assert host.waiting() == ["web.0.1100"]


def test_a_service_outlives_a_role_of_it_that_runs_once():
    host = ScriptedHost()
    host.submit({"migrate": task(restart="temporary"), "web": task()}, service=True)
    host.start()
    host.exit("migrate.0.0", code=0)
    assert host.wanted("term") == []
    host.exit("web.0.0", code=1)
    host.advance(60.0)
    assert host.waiting() == ["web.0.1"]


def test_roles_stop_in_reverse_order_of_start():
    host = ScriptedHost()
    host.submit({"a": task(after=["b"]), "b": task(), "c": task(after=["a"])})
    host.start("b.0.0")
    host.start("a.0.0")
    host.start("c.0.0")
    host.stop()
    for name in ("c.0.0", "a.0.0", "b.0.0"):
        assert host.wanted("term") == [name]
        host.exit(name, signal=15)
    assert host.ended.outcome == "stopped"


def test_a_hard_stop_kills_all_at_once_also_after_a_soft_one():
    host = ScriptedHost()
    host.submit({"a": task(), "b": task()})
    host.start()
    host.stop()
    assert host.wanted("term") == ["b.0.0"]
    host.stop(hard=True)
    assert sorted(host.wanted("kill")) == ["a.0.0", "b.0.0"]
    host.exit("a.0.0", signal=9)
    host.exit("b.0.0", signal=9)
    assert host.ended.exit_code == 137
    assert len(host.facts(CommandDone)) == 3


def test_a_role_waits_until_what_it_needs_is_ready():
    host = ScriptedHost()
    db = task(restart="permanent", ports={"sql": 0}, ready=Probe(port="sql"))
    host.submit({"db": db, "work": task(after_ready=["db"])})
    assert host.waiting() == []
    reserve = host.reserves[host.run]
    assert reserve.ports == {"db/0/sql": 0}
    host.report("ports", ports={"db/0/sql": 4321})
    assert host.waiting() == ["db.0.0"]
    assert host.want("db.0.0").launch.env["ARGOSY_PORT_SQL"] == "4321"
    host.start()
    assert host.waiting() == []
    assert "db to be ready" in host.coordinator.run_view(host.run).waiting
    host.report("ready", "db.0.0")
    assert host.waiting() == ["work.0.0"]
    assert host.want("work.0.0").launch.env["ARGOSY_PORT_DB_0_SQL"] == "4321"


def test_a_port_that_cannot_be_had_fails_the_run_before_anything_starts():
    host = ScriptedHost()
    host.submit({"db": task(ports={"sql": 80})})
    host.report("ports_refused", reason="port 80 is in use")
    assert host.ended.outcome == "failed"
    assert "port 80" in host.ended.reason
    assert not host.facts(AttemptPlanned)


def test_a_process_that_never_becomes_ready_is_a_failure_of_the_program():
    host = ScriptedHost()
    host.submit({"db": task(ports={"p": 0}, ready=Probe(port="p"))})
    host.report("ports", ports={"db/0/p": 1})
    host.start()
    host.report("unready", "db.0.0", reason="connection refused for 60 s")
    assert host.wanted("kill") == ["db.0.0"]
    host.exit("db.0.0", signal=9)
    assert host.ended.outcome == "failed"
    assert "not ready in time" in host.ended.reason


def test_a_hung_process_is_killed_and_restarted_from_the_hang_budget():
    host = ScriptedHost()
    host.submit({"a": task(restart="transient", budget=Budget(user=0), hang_seconds=5.0)})
    host.start()
    host.report("progressed", "a.0.0", step=1)
    host.report("hung", "a.0.0", reason="no step for 5 s")
    host.exit("a.0.0", signal=9)
    assert host.facts(AttemptExited)[-1].hung
    host.advance(1.0)
    assert host.waiting() == ["a.0.1"]


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
def test_a_failure_takes_with_it_what_the_strategy_says(strategy):
    host = ScriptedHost()
    roles = {name: task(restart="transient") for name in ("a", "b", "c")}
    host.submit(roles, strategy=strategy)
    host.start()
    host.exit("b.0.0", code=1)
    taken = {"one_for_one": [], "one_for_all": ["c.0.0", "a.0.0"], "rest_for_one": ["c.0.0"]}
    for name in taken[strategy]:
        assert host.waiting() == []
        assert host.wanted("term") == [name]
        host.exit(name, signal=15)
    restarted = sorted(["b.0.1", *(f"{name[0]}.0.1" for name in taken[strategy])])
    host.advance(0.1)
    assert sorted(host.waiting()) == restarted
    planned = [f.attempt.split(".")[1] for f in host.facts(AttemptPlanned)[3:]]
    assert planned == sorted(planned)


def test_a_stopped_process_is_not_restarted_and_the_rest_goes_on():
    host = ScriptedHost()
    host.submit({"a": task(count=2, restart="permanent")})
    host.start()
    command = host.stop("a", 1)
    assert host.wanted("term") == ["a.1.0"]
    host.exit("a.1.0", signal=15)
    host.advance(100.0)
    assert host.waiting() == []
    assert host.ended is None
    assert host.facts(CommandDone)[-1].command == command


def test_the_first_cause_is_the_killed_process_not_the_one_reaped_first():
    host = ScriptedHost()
    host.submit({"a": task(count=2)})
    host.start()
    died_at = host.now
    host.advance(0.01)
    error = "RuntimeError: [gloo] Connection closed by peer"
    host.report("exited", "a.0.0", code=1, error=error, at=host.now)
    host.report("exited", "a.1.0", signal=9, at=died_at)
    assert host.ended.first_cause.endswith("a.1.0")
    assert host.ended.exit_code == 137


def test_a_lost_keeper_costs_a_restart_of_class_host():
    host = ScriptedHost()
    host.submit({"a": task(restart="transient", budget=Budget(user=0))})
    host.start()
    host.replace_keeper()
    assert host.facts(AttemptExited)[-1].lost
    host.advance(0.1)
    assert host.waiting() == ["a.0.1"]


def test_ports_are_held_again_under_a_new_keeper_with_the_same_numbers():
    host = ScriptedHost()
    host.submit({"a": task(restart="transient", ports={"p": 0})})
    host.report("ports", ports={"a/0/p": 777})
    host.start()
    host.replace_keeper()
    host.advance(0.1)
    assert host.waiting() == []
    assert host.reserves[host.run].ports == {"a/0/p": 777}
    host.report("ports", ports={"a/0/p": 777})
    assert host.waiting() == ["a.0.1"]
    assert len(host.facts(PortsReserved)) == 2


def test_an_impossible_fact_raises_with_the_story():
    host = ScriptedHost()
    host.submit({"a": task()})
    host.start()
    supervisor = host.coordinator.runs[host.run]
    fact = AttemptStarted(attempt=f"{host.run}.a.0.0", run=host.run, pid=1, how="exec")
    with pytest.raises(InvariantError) as caught:
        supervisor.apply(Event(seq=99, at=0.0, fact=fact))
    assert any("AttemptPlanned" in line for line in caught.value.story)


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_log_that_is_cut_anywhere_continues_to_a_proper_end(cut):
    host = ScriptedHost()
    roles = {"db": task(restart="permanent"), "g": task(gang=True, count=2, after=["db"])}
    host.submit(roles)
    host.start()
    host.start()
    host.exit("g.0.0", signal=9)
    host.exit("g.1.0", signal=15)
    host.start()
    host.stop()
    if cut >= len(host.log):
        return
    host.cut_log(cut)
    planned = {fact.attempt for fact in host.facts(AttemptPlanned)}
    gone = {fact.attempt for fact in host.facts(AttemptExited)}
    begun = {fact.attempt for fact in host.facts(AttemptStarted)}
    # What the keeper saw is reported again: it was never acknowledged.
    host.started, host.exited = begun & planned, gone
    host._number = 1000
    host.wants.clear()
    host.restart_controller()
    if host.run not in host.coordinator.runs:
        assert not host.facts(RunEnded)
        assert not host.coordinator.pending
        return
    for _ in range(20):
        host.start(*host.waiting())
        host.advance(1.0)
        if host.coordinator.runs[host.run].stop is None and host.ended is None:
            host.stop()
        for name in host.wanted("term") + host.wanted("kill"):
            host.exit(name, signal=15)
    assert host.ended is not None
    assert not host.coordinator.pending
    assert len(host.facts(StopRequested)) <= 2
    assert len(host.facts(AttemptStopping)) == len({f.attempt for f in host.facts(AttemptStopping)})


def test_a_large_gang_that_starts_and_joins_is_not_looked_through_for_each_of_its_members(
    monkeypatch,
):
    asked = []
    for name in ("_was_started", "_has_joined"):
        ask = getattr(runstate, name)
        monkeypatch.setattr(runstate, name, lambda p, ask=ask: asked.append(p) or ask(p))
    host = ScriptedHost()
    host.submit({"train": RoleSpec(command=["x"], gang=True, count=100)})
    for index in range(100):
        host.start(f"train.{index}.0")
    role = host.coordinator.runs[host.run].roles["train"]
    assert role.has_started
    assert not role.can_join
    for index in range(100):
        host.report("joined", f"train.{index}.0", generation=1)
    assert role.can_join
    assert len(asked) < 4 * 100
