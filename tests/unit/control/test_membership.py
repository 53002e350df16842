from __future__ import annotations

import pytest

from argosy.config.spec import Backoff, Budget, RoleSpec, RunSpec, Submission
from argosy.control.attempts import seats_of
from argosy.control.coordinator import Coordinator
from argosy.errors import InvariantError
from argosy.protocol.facts import (
    AttemptPlanned,
    AttemptReleased,
    Event,
    GenerationFormed,
    StopRequested,
)
from argosy.protocol.messages import Hello, Wants
from argosy.testing.scripted import ScriptedHost

AT_ONCE = Backoff(first_seconds=0.0, jitter=0.0)


def gang(count=4, **more):
    return RoleSpec(command=["python", "train.py"], gang=True, count=count, **more)


def begin(host, *, joined=False, count=4, **more):
    host.submit({"train": gang(count, **more)})
    host.start()
    if joined:
        for index in range(count):
            host.report("joined", f"train.{index}.0", generation=1)


def members(host):
    return [fact.members for fact in host.facts(GenerationFormed)]


def test_a_gang_starts_as_generation_one_with_torchruns_environment():
    host = ScriptedHost()
    host.submit({"train": gang(2, budget=Budget(user=5))})
    env = host.want("train.1.0").launch.env
    expected = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "train",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": host.run,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "ARGOSY_GENERATION": "1",
    }
    assert {key: env.get(key) for key in expected} == expected
    assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"errors/{host.run}.train.1.0.json")
    assert members(host) == [[0, 1]]


def test_ranks_have_one_thread_each_unless_the_user_says_how_many():
    host = ScriptedHost()
    host.submit({"train": gang(2), "own": gang(2, env={"OMP_NUM_THREADS": "4"})})
    assert host.want("train.0.0").launch.threads == 1
    own = host.want("own.0.0").launch
    assert (own.threads, own.env.get("OMP_NUM_THREADS")) == (None, None)
    coordinator = Coordinator(runs_directory="/runs")
    submission = Submission(spec=RunSpec(roles={"train": gang(2)}), env={"OMP_NUM_THREADS": "4"})
    hello = Hello(version=1, host="h", keeper="k", pid=1, cpus=2, memory_bytes=1, alive=[])
    coordinator.receive(0.0, "h", hello)
    _, outputs = coordinator.submit(1.0, submission, env_blob="e", secret_blobs={})
    [wants] = [message for _, message in outputs.messages if isinstance(message, Wants)]
    assert [want.launch.threads for want in wants.wants] == [None, None]


def test_a_plain_gang_restarts_together_after_all_of_it_is_reaped():
    host = ScriptedHost()
    begin(host, backoff=AT_ONCE)
    host.exit("train.2.0", signal=9)
    assert sorted(host.wanted("term")) == ["train.0.0", "train.1.0", "train.3.0"]
    for index in (0, 1):
        host.exit(f"train.{index}.0", signal=15)
    assert len(members(host)) == 1, "one of the old generation is not reaped"
    host.exit("train.3.0", signal=15)
    host.advance(0.1)
    assert members(host) == [[0, 1, 2, 3]] * 2
    assert host.waiting() == [f"train.{index}.1" for index in range(4)]
    env = host.want("train.2.1").launch.env
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["ARGOSY_GENERATION"]) == ("1", "2")


def test_members_that_joined_survive_and_reform_around_a_replacement():
    host = ScriptedHost()
    begin(host, joined=True, backoff=AT_ONCE)
    host.exit("train.2.0", signal=9)
    assert host.wanted("term") == []
    assert members(host)[-1] == [0, 1, 2, 3]
    assert host.waiting() == ["train.2.1"]
    want = host.want("train.0.0")
    assert want.state == "running"
    assert want.reform == {"generation": 2, "rank": 0, "world_size": 4}
    assert host.want("train.2.1").launch.rank == 2


def test_a_host_hears_from_the_next_controller_who_will_not_come_to_a_generation():
    host = ScriptedHost()
    begin(host, joined=True, backoff=AT_ONCE)
    host.exit("train.2.0", signal=9)
    host.exit("train.0.0", code=0)  # and was never told its place beside the replacement
    host.wants.clear()
    host.restart_controller()
    want = host.want("train.0.0")
    assert (want.state, want.reform) == ("gone", {"generation": 2, "rank": 0, "world_size": 4})
    assert f"{host.run}.train.2.0" not in host.wants
    host.report_version()
    host.wants.clear()
    host.hello()
    assert f"{host.run}.train.0.0" not in host.wants


def test_who_did_not_come_to_a_generation_concerns_nobody_after_it():
    host = ScriptedHost()
    begin(host, joined=True, backoff=AT_ONCE)
    host.exit("train.2.0", signal=9)
    host.exit("train.0.0", signal=9)
    host.advance(0.1)
    assert len(members(host)) == 3
    host.wants.clear()
    host.restart_controller()
    assert f"{host.run}.train.0.0" not in host.wants
    host.start()
    for name in ("train.0.1", "train.1.0", "train.2.1", "train.3.0"):
        host.exit(name, code=0)
    assert host.ended.outcome == "succeeded"
    host.wants.clear()
    host.restart_controller()
    assert not host.wants


def test_members_that_have_not_joined_are_restarted_beside_those_that_have():
    host = ScriptedHost()
    begin(host, backoff=AT_ONCE)
    host.report("joined", "train.0.0", generation=1)
    host.exit("train.2.0", signal=9)
    assert sorted(host.wanted("term")) == ["train.1.0", "train.3.0"]
    host.exit("train.1.0", signal=15)
    host.exit("train.3.0", signal=15)
    assert host.want("train.0.0").reform["generation"] == 2
    assert host.waiting() == ["train.2.1", "train.1.1", "train.3.1"] or sorted(host.waiting()) == [
        "train.1.1",
        "train.2.1",
        "train.3.1",
    ]


def test_a_spare_takes_the_dead_members_rank_and_a_new_spare_is_parked():
    host = ScriptedHost()
    begin(host, joined=False, spares=1, backoff=AT_ONCE)
    host.start()
    assert host.want("train.4.0").launch.parked
    assert "RANK" not in host.want("train.4.0").launch.env
    for index in range(4):
        host.report("joined", f"train.{index}.0", generation=1)
    host.exit("train.1.0", signal=9)
    assert members(host)[-1] == [0, 4, 2, 3]
    released = host.facts(AttemptReleased)[-1]
    assert (released.attempt, released.rank) == (f"{host.run}.train.4.0", 1)
    launch = host.want("train.4.0").launch
    assert not launch.parked
    assert launch.env["RANK"] == "1"
    parked = host.facts(AttemptPlanned)[-1]
    assert (parked.index, parked.parked) == (1, True)


def test_a_member_that_ends_well_early_is_not_a_failure():
    host = ScriptedHost()
    begin(host, count=3)
    host.exit("train.0.0", code=0)
    host.exit("train.1.0", code=0)
    assert host.ended is None
    assert host.wanted("term") == []
    host.exit("train.2.0", code=0)
    assert host.ended.outcome == "succeeded"


def test_parked_spares_do_not_keep_a_finished_run_alive():
    host = ScriptedHost()
    begin(host, count=1, spares=2)
    host.start()
    host.exit("train.0.0", code=0)
    assert sorted(host.wanted("kill")) == ["train.1.0", "train.2.0"]
    host.exit("train.1.0", signal=9)
    host.exit("train.2.0", signal=9)
    assert host.ended.outcome == "succeeded"


def test_a_gang_counts_one_failure_for_each_generation_however_many_members_fell():
    host = ScriptedHost()
    begin(host, count=2, budget=Budget(user=2), backoff=AT_ONCE)
    for number in range(2):
        host.start()
        host.exit(f"train.0.{number}", code=1)
        host.exit(f"train.1.{number}", code=1)
        host.advance(30.0)
        assert host.ended is None
    host.start()
    host.exit("train.0.2", code=1)
    host.exit("train.1.2", code=1)
    assert host.ended.outcome == "failed"


def test_an_elastic_gang_goes_on_smaller_when_its_budget_is_spent():
    host = ScriptedHost()
    begin(host, joined=True, min=2, budget=Budget(user=0), backoff=AT_ONCE)
    host.exit("train.1.0", code=1)
    assert members(host)[-1] == [0, 2, 3]
    assert host.want("train.3.0").reform == {"generation": 2, "rank": 2, "world_size": 3}
    host.exit("train.0.0", code=1)
    assert members(host)[-1] == [2, 3]
    assert host.waiting() == []
    host.exit("train.2.0", code=1)
    assert host.wanted("term") == ["train.3.0"]
    host.exit("train.3.0", signal=15)
    assert host.ended.outcome == "failed"


def test_the_cause_of_a_gangs_failure_is_the_kill_not_the_broken_collective():
    host = ScriptedHost()
    begin(host, count=2, budget=Budget(user=0, host=5), backoff=AT_ONCE)
    died_at = host.now
    host.advance(0.01)
    host.report("exited", "train.0.0", code=1, error="[gloo] connection reset", at=host.now)
    host.report("exited", "train.1.0", signal=9, at=died_at)
    assert len(members(host)) == 2, "a kill from outside is not charged to the program"


def test_stopping_one_member_of_an_elastic_gang_makes_it_smaller():
    host = ScriptedHost()
    begin(host, joined=True, min=2)
    host.stop("train", 3)
    host.exit("train.3.0", signal=15)
    assert members(host)[-1] == [0, 1, 2]


def test_stopping_one_member_of_a_rigid_gang_ends_it():
    host = ScriptedHost()
    begin(host, joined=True)
    host.stop("train", 3)
    host.exit("train.3.0", signal=15)
    assert sorted(host.wanted("term")) == ["train.0.0", "train.1.0", "train.2.0"]
    for index in range(3):
        host.exit(f"train.{index}.0", signal=15)
    assert host.ended.outcome == "stopped"


def test_a_generation_before_the_last_is_reaped_is_impossible():
    host = ScriptedHost()
    begin(host, count=2)
    supervisor = host.coordinator.runs[host.run]
    fact = GenerationFormed(run=host.run, role="train", generation=2, members=[0, 1], reason="")
    with pytest.raises(InvariantError, match="reaped"):
        supervisor.apply(Event(seq=99, at=0.0, fact=fact))


def test_a_spare_that_dies_while_parked_is_parked_again_and_costs_the_gang_nothing():
    host = ScriptedHost()
    begin(host, count=2, spares=1, budget=Budget(host=2), backoff=AT_ONCE)
    host.start()
    for number in range(3):
        host.exit(f"train.2.{number}", signal=9)
        host.advance(1.0)
        host.start()
    assert len(members(host)) == 1
    assert host.ended is None
    assert host.wanted() == ["train.0.0", "train.1.0"], "its budget is spent: no further spare"


def test_a_plain_gang_backs_off_between_generations_of_its_own_failures():
    host = ScriptedHost()
    begin(host, count=1, budget=Budget(user=9), backoff=Backoff(first_seconds=2.0, jitter=0.0))
    host.exit("train.0.0", code=1)
    host.advance(1.9)
    assert len(members(host)) == 1
    assert "restarts in" in host.coordinator.run_view(host.run).waiting
    host.advance(0.2)
    assert len(members(host)) == 2


def test_a_permanent_gang_that_ends_well_is_formed_again():
    host = ScriptedHost()
    begin(host, count=2, restart="permanent", backoff=Backoff(first_seconds=1.0, jitter=0.0))
    host.exit("train.0.0", code=0)
    assert len(members(host)) == 1
    host.exit("train.1.0", code=0)
    host.advance(0.9)
    assert len(members(host)) == 1
    host.advance(0.2)
    assert members(host) == [[0, 1], [0, 1]]
    assert host.waiting() == ["train.0.1", "train.1.1"]


def test_a_gang_that_makes_progress_between_failures_is_not_given_up():
    host = ScriptedHost()
    budget = Budget(user=50, no_progress=2)
    begin(host, count=2, budget=budget, backoff=Backoff(most_seconds=1.0))
    for number in range(6):
        host.report("progressed", f"train.1.{number}", step=1)
        host.exit(f"train.0.{number}", code=1)
        host.exit(f"train.1.{number}", signal=15)
        host.advance(5.0)
        host.start()
    assert host.ended is None


SYNTAX = '  File "train.py", line 1\n    def f(:\nSyntaxError: invalid syntax (train.py, line 1)\n'


def test_a_source_that_cannot_run_is_not_started_again():
    host = ScriptedHost()
    begin(host, count=2, min=1)
    host.exit("train.1.0", code=1, error=SYNTAX)
    host.exit("train.0.0", code=1, error=SYNTAX)
    assert (host.ended.outcome, host.ended.exit_code) == ("failed", 1)
    assert "would end in the same way: SyntaxError: invalid syntax" in host.ended.reason
    assert len(host.facts(GenerationFormed)) == 1


def test_a_gang_of_a_service_is_started_again_whatever_it_says():
    host = ScriptedHost()
    host.submit({"serve": gang(2)}, service=True)
    for number in range(5):
        host.start()
        host.exit(f"serve.1.{number}", code=1, error=SYNTAX)
        host.exit(f"serve.0.{number}", code=1, error=SYNTAX)
        host.advance(60.0)
    assert host.ended is None
    assert sorted(host.waiting()) == ["serve.0.5", "serve.1.5"]


def test_a_new_generation_says_which_restart_it_is():
    host = ScriptedHost()
    begin(host, count=2)
    for number, end in enumerate([{"code": 1}, {"code": 2}, {"signal": 9}]):
        host.exit(f"train.0.{number}", **end)
        host.exit(f"train.1.{number}", signal=15)
        host.advance(5.0)
        host.start()
    assert [fact.reason.partition("; ")[2] for fact in host.facts(GenerationFormed)[1:]] == [
        "restart 1 of 3",
        "restart 2 of 3",
        "restart 1 of 100 after failures of the host",
    ]


def test_the_same_error_twice_without_progress_ends_the_gang_as_in_a_household():
    host = ScriptedHost()
    begin(host, count=2)
    error = "Traceback\n  File x\nAttributeError: no such thing"
    for number in range(2):
        host.exit(f"train.{number}.{number}", code=1, error=error)
        host.exit(f"train.{1 - number}.{number}", signal=15)
        host.advance(5.0)
        host.start()
    assert (host.ended.outcome, host.ended.exit_code) == ("failed", 1)
    assert "it failed twice in the same way without progress in between" in host.ended.reason
    assert len(host.facts(GenerationFormed)) == 2


@pytest.mark.parametrize("between", ["other words", "no words", "progress", "never"])
def test_an_error_that_is_not_repeated_in_a_row_is_tried_again(between):
    host = ScriptedHost()
    begin(host, count=2, budget=Budget(user=9, no_progress=0, same_error=2 * (between != "never")))
    for number, said in enumerate(["ValueError: a", "ValueError: b", "ValueError: a"]):
        error = {"other words": said, "no words": ""}.get(between, "ValueError: a")
        if between == "progress":
            host.report("progressed", f"train.1.{number}", step=1)
        host.exit(f"train.0.{number}", code=1, error=error)
        host.exit(f"train.1.{number}", signal=15)
        host.advance(5.0)
        host.start()
    assert host.ended is None


BUG = "Traceback\n  File x\nValueError: my bug"


def stepped(host, *names):
    for name in names:
        host.report("progressed", name, step=1)


def raised(host, *names, error=BUG):
    for name in names:
        host.exit(name, code=1, error=error)


def stop_reason(host):
    [stop] = host.facts(StopRequested)
    return stop.reason


def restarts(host):
    return [fact.reason.rpartition("; ")[2] for fact in host.facts(GenerationFormed)[1:]]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_raise_one_after_another_have_failed_once_and_the_second_time_is_the_last(rank):
    host = ScriptedHost()
    begin(host, joined=True, count=2)
    stepped(host, "train.0.0", "train.1.0")
    raised(host, "train.1.0", "train.0.0")
    assert restarts(host) == ["restart 1 of 3"] * 2, "each end forms a generation of its own"
    host.start()
    raised(host, f"train.{rank}.1")
    assert "twice in the same way without progress in between" in stop_reason(host)


def test_a_slow_survivor_that_raises_the_same_belongs_to_the_first_failure_also_later():
    host = ScriptedHost()
    begin(host, joined=True, count=4, budget=Budget(user=1))
    for index in range(4):
        raised(host, f"train.{index}.0")
        host.advance(5.0)
    assert host.ended is None
    assert restarts(host) == ["restart 1 of 1"] * 4


def test_survivors_of_a_raise_that_lose_their_peer_are_part_of_it():
    host = ScriptedHost()
    begin(host, joined=True, count=2)
    raised(host, "train.1.0")
    host.advance(5.0)
    raised(host, "train.0.0", error="RuntimeError: gloo: connection closed by peer")
    host.start()
    raised(host, "train.1.1")
    assert "twice in the same way" in stop_reason(host)


@pytest.mark.parametrize("who", ["train.0.0", "train.1.1"])
def test_the_same_error_after_a_step_of_the_replacement_is_another_failure(who):
    host = ScriptedHost()
    begin(host, joined=True, count=2)
    stepped(host, "train.0.0", "train.1.0")
    raised(host, "train.1.0")
    host.start()
    host.report("joined", "train.1.1", generation=2)
    stepped(host, "train.1.1")
    raised(host, who)
    assert restarts(host) == ["restart 1 of 3", "restart 2 of 3"]
    assert host.ended is None


def test_a_survivors_first_step_told_late_is_no_progress_since_the_failure():
    host = ScriptedHost()
    begin(host, joined=True, count=2)
    raised(host, "train.1.0")
    stepped(host, "train.0.0")
    host.start()
    raised(host, "train.1.1")
    assert "twice in the same way" in stop_reason(host)


@pytest.mark.parametrize("has_progressed", [False, True])
def test_a_kill_between_two_like_failures_is_not_progress(has_progressed):
    host = ScriptedHost()
    begin(host, joined=True, count=2)
    raised(host, "train.1.0")
    host.start()
    if has_progressed:
        stepped(host, "train.1.1")
    host.exit("train.0.0", signal=9)
    host.start()
    raised(host, "train.1.1")
    assert bool(host.facts(StopRequested)) != has_progressed


def test_without_restarts_an_end_just_after_another_is_not_followed_by_one_either():
    host = ScriptedHost()
    begin(host, joined=True, count=4, min=1, budget=Budget(user=0))
    raised(host, "train.3.0", "train.2.0")
    assert members(host) == [[0, 1, 2, 3], [0, 1, 2], [0, 1]]


def test_a_program_that_has_trained_and_twice_cannot_be_started_is_tried_again():
    host = ScriptedHost()
    begin(host, joined=True, count=2)
    stepped(host, "train.0.0", "train.1.0")
    host.exit("train.1.0", signal=9)
    for number in (1, 2):
        host.exit(f"train.1.{number}", error="train.py: No such file or directory")
        host.advance(5.0)
    assert host.waiting() == ["train.1.3"]
    assert restarts(host)[1:] == ["restart 1 of 3", "restart 2 of 3"]


def test_a_trainer_that_takes_long_to_begin_has_made_no_progress_by_that():
    host = ScriptedHost()
    begin(host, joined=True, count=2)
    stepped(host, "train.0.0", "train.1.0")
    raised(host, "train.1.0", "train.0.0")
    host.start()
    for index in range(2):
        host.report("joined", f"train.{index}.1", generation=3)
    host.advance(300.0)
    raised(host, "train.0.1")
    assert "twice in the same way" in stop_reason(host)


@pytest.mark.parametrize("reason", ["it progressed", "it lived long", "another error"])
def test_what_may_end_in_another_way_is_started_again(reason):
    host = ScriptedHost()
    begin(host, count=2)
    error = "NameError: name 'x' is not defined"
    if reason == "it progressed":
        host.report("progressed", "train.0.0", step=1)
    elif reason == "it lived long":
        host.advance(31.0)
    else:
        error = "RuntimeError: NameError"
    host.exit("train.1.0", code=1, error=error)
    host.exit("train.0.0", signal=15)
    assert len(host.facts(GenerationFormed)) == 2


def test_ranks_are_seated_by_host_in_the_order_of_ranks():
    assert seats_of(["a", "b", "a", "a"]) == [
        (0, 3, 0, 2),
        (0, 1, 1, 2),
        (1, 3, 0, 2),
        (2, 3, 0, 2),
    ]
