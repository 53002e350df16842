"""A run that is stopped while its processes are being replaced: what it has come to is saved, or it is said that it was not."""

from __future__ import annotations

import pytest

from argosy.config.spec import Backoff, Budget, RoleSpec
from argosy.control.shutdown import patience_ends_at
from argosy.errors import ConfigError
from argosy.protocol.facts import (
    AttemptSaving,
    AttemptSuspected,
    GangBounded,
    GenerationFormed,
    StateSaved,
)
from argosy.testing.scripted import ScriptedHost

BOUNDS = {"least": 1, "most": 8, "why": "it has 8 lanes", "hang_seconds": 300.0}
LEFT = 143


def train(*, count=3, has_trained=True, keeps_state=True, **more):
    """A gang that trains."""
    host = ScriptedHost()
    backoff = Backoff(first_seconds=0.5, jitter=0.0)
    role = RoleSpec(command=["x"], gang=True, count=count, backoff=backoff, **more)
    host.submit({"train": role})
    host.start()
    for index in range(count):
        enter(host, f"train.{index}.0", keeps_state=keeps_state)
        if has_trained:
            host.report("progressed", f"train.{index}.0", step=1)
    return host


def enter(host, name, generation=1, keeps_state=True):
    host.report("joined", name, generation=generation)
    host.report("bounded", name, **BOUNDS, keeps_state=keeps_state)
    host.report("entered", name)


def kill_all(host, number=0):
    for index in range(3):
        host.exit(f"train.{index}.{number}", signal=9)


def saver(host):
    (name,) = host.waiting()
    assert host.want(name).launch.env["ARGOSY_STOPPING"] == "1"
    assert (host.want(name).launch.rank, host.want(name).launch.world_size) == (0, 1)
    return name


def test_a_stop_while_nobody_is_alive_starts_one_process_that_saves():
    host = train()
    kill_all(host)
    host.stop()
    name = saver(host)
    assert host.facts(GenerationFormed)[-1].members == [0]
    host.start(name)
    assert host.wanted("term") == host.wanted("kill") == []
    host.report("saved", name, step=40, path="/runs/r/saves/step-000000040")
    host.exit(name, signal=15)
    assert (host.ended.outcome, host.ended.exit_code) == ("stopped", 143)
    assert host.ended.reason == "stop was asked for"


def test_replacements_that_are_told_to_end_before_they_can_save_are_made_good():
    host = train()
    kill_all(host)
    host.advance(1.0)
    host.start("train.0.1")  # the others are still to be started
    host.stop()
    host.exit("train.0.1", signal=15)
    for index in (1, 2):
        host.exit(f"train.{index}.1", error="it was told to end before it was started")
    assert saver(host) == "train.0.2"


def test_a_keeper_that_dies_in_the_middle_of_a_stop_is_followed_by_a_save():
    host = train()
    host.stop()
    host.replace_keeper()
    name = saver(host)
    host.start(name)
    host.restart_controller()
    host.report("saved", name, step=7, path="/p")
    host.exit(name, signal=15)
    assert host.ended.reason == "stop was asked for"


def test_whoever_saves_by_itself_needs_nobody():
    host = train()
    host.stop()
    for index in range(3):
        host.report("saved", f"train.{index}.0", step=9, path="/p")
        host.exit(f"train.{index}.0", signal=15)
    assert len(host.facts(StateSaved)) == 1
    assert host.ended.reason == "stop was asked for"


def test_state_that_has_ended_with_its_ranks_is_said_to_be_lost():
    host = train(keeps_state=False)
    kill_all(host)
    host.stop()
    assert host.waiting() == []
    assert host.ended.reason == "stop was asked for; nothing was saved at its end"


def test_members_that_had_no_step_to_save_need_nobody_to_do_it():
    host = train(has_trained=False)
    host.stop()
    host.report("saved", "train.0.0", step=0, path="")
    for index in range(3):
        host.exit(f"train.{index}.0", signal=15)
    assert (host.waiting(), host.ended.reason) == ([], "stop was asked for")


def test_a_step_of_which_nobody_could_tell_is_looked_for():
    host = train(has_trained=False)
    kill_all(host)
    host.stop()
    name = saver(host)
    host.start(name)
    host.report("saved", name, step=1, path="/p")
    host.exit(name, signal=15)
    assert host.ended.reason == "stop was asked for"


def test_a_save_that_fails_is_not_tried_again():
    host = train()
    host.stop()
    host.exit("train.0.0", code=1, error="OSError: no space left on device")
    for index in (1, 2):
        host.exit(f"train.{index}.0", code=LEFT)
    assert host.waiting() == []
    assert host.ended.reason == "stop was asked for; nothing was saved at its end"


def test_work_that_was_finished_is_not_begun_again():
    host = train()
    host.stop()
    for index in range(3):
        host.exit(f"train.{index}.0", code=0)
    assert (host.waiting(), host.ended.reason) == ([], "stop was asked for")


def train_beside_others():
    """A gang of two that trains, and a role that goes on when it has ended."""
    host = ScriptedHost()
    backoff = Backoff(first_seconds=0.5, jitter=0.0)
    gang = RoleSpec(command=["x"], gang=True, count=2, backoff=backoff)
    host.submit({"train": gang, "other": RoleSpec(command=["x"], budget=Budget(user=0))})
    host.start()
    for index in range(2):
        enter(host, f"train.{index}.0")
        host.report("progressed", f"train.{index}.0", step=1)
    return host


def test_a_gang_that_has_finished_is_not_started_again_by_a_later_stop():
    host = train_beside_others()
    host.report("saved", "train.0.0", step=8, path="/p")
    for index in range(2):
        host.exit(f"train.{index}.0", code=0)
    host.advance(60.0)
    host.stop()
    host.exit("other.0.0", signal=15)
    assert (host.waiting(), host.ended.reason) == ([], "stop was asked for")


def test_a_gang_that_has_finished_is_not_started_again_when_another_role_is_given_up():
    host = train_beside_others()
    host.report("saved", "train.0.0", step=8, path="/p")
    for index in range(2):
        host.exit(f"train.{index}.0", code=0)
    host.exit("other.0.0", code=1)
    assert (host.waiting(), host.ended.outcome) == ([], "failed")


def test_a_member_that_is_still_busy_after_a_save_that_has_ended_well_needs_no_saver():
    host = train_beside_others()
    host.report("saved", "train.0.0", step=8, path="/p")
    host.exit("train.0.0", code=0)
    host.stop()
    host.exit("other.0.0", signal=15)
    host.exit("train.1.0", signal=15)
    assert (host.waiting(), host.ended.outcome) == ([], "stopped")


def test_a_first_rank_that_is_killed_in_its_last_save_is_made_good_although_others_have_ended_well():
    host = train_beside_others()
    host.exit("train.1.0", code=0)
    host.exit("train.0.0", signal=9)
    host.stop()
    host.exit("other.0.0", signal=15)
    assert host.waiting() == ["train.0.1"]


def test_a_first_rank_that_is_killed_in_its_last_save_after_a_stop_is_made_good_or_missed():
    host = train()
    host.stop()
    for index in (1, 2):
        host.exit(f"train.{index}.0", code=0)
    host.exit("train.0.0", signal=9)
    name = saver(host)
    host.start(name)
    host.exit(name, code=1)
    assert (host.waiting(), host.ended.outcome) == ([], "stopped")
    assert "nothing was saved at its end (a process was started to save it" in host.ended.reason


def test_the_save_of_one_gang_is_not_taken_for_that_of_another():
    host = ScriptedHost()
    gang = RoleSpec(command=["x"], gang=True, count=1)
    host.submit({"first": gang, "second": gang})
    host.start()
    for role in ("first", "second"):
        enter(host, f"{role}.0.0")
        host.report("progressed", f"{role}.0.0", step=1)
    host.stop()
    host.report("saved", "second.0.0", step=3, path="/p")
    host.exit("second.0.0", signal=15)
    host.exit("first.0.0", signal=9)
    assert host.waiting() == ["first.0.1"]


def test_a_saver_that_is_lost_is_started_again_and_one_that_takes_too_long_is_given_up():
    host = train(grace_seconds=20.0)
    kill_all(host)
    host.stop()
    host.start(saver(host))
    host.replace_keeper()
    again = saver(host)
    host.start(again)
    host.advance(19.0)
    assert host.wanted("kill") == []
    host.advance(2.0)
    assert host.wanted("kill") == [again]
    host.exit(again, signal=9)
    assert "nothing was saved" in host.ended.reason
    assert "it has not done so within 20 s" in host.ended.reason


def test_a_saver_is_waited_for_as_long_as_its_save_goes_on_and_a_grace_longer():
    host = train(grace_seconds=20.0)
    kill_all(host)
    host.stop()
    name = saver(host)
    host.start(name)
    for number in range(1, 5):
        host.advance(15.0)
        host.report("saving", name, **advance(number))
        assert host.wanted("kill") == []
    assert (
        host.coordinator.runs[host.run].waits["train/0"] == "saves step 40: 4.0 of 9.0 MiB written"
    )
    host.restart_controller()
    host.advance(19.0)
    assert host.wanted("kill") == []
    host.advance(2.0)
    assert host.wanted("kill") == [name]
    host.exit(name, signal=9)
    assert "it has not done so within 80 s" in host.ended.reason


def test_who_waits_for_a_stop_sees_how_far_the_save_is():
    host = train()
    host.stop()
    host.report("saving", "train.0.0", **advance(3))
    assert (
        host.coordinator.runs[host.run].waits["train/0"] == "saves step 40: 3.0 of 9.0 MiB written"
    )
    host.exit("train.0.0", signal=15)
    host.report("saving", "train.0.0", **advance(4))  # late: it changes nothing
    assert len(host.facts(AttemptSaving)) == 1


def test_the_end_of_a_cluster_waits_for_saves_that_go_on():
    host = train()
    host.stop()
    began = host.now
    runs = host.coordinator.runs.values()
    assert patience_ends_at(runs, began) == began + 30.0
    host.advance(25.0)
    host.report("saving", "train.1.0", **advance(3))
    assert patience_ends_at(runs, began) == began + 55.0
    host.exit("train.1.0", signal=15)
    assert patience_ends_at(runs, began) == began + 30.0


def advance(mebibytes):
    return {"step": 40, "num_bytes": mebibytes << 20, "total_bytes": 9 << 20, "what": "written"}


def test_a_hard_stop_waits_for_nobody_and_says_what_that_costs():
    host = train()
    host.report("saved", "train.0.0", step=5, path="/p")
    kill_all(host)
    host.stop()
    name = saver(host)
    host.start(name)
    host.stop(hard=True)
    host.exit(name, signal=9)
    assert host.ended.exit_code == 137
    assert host.ended.reason.startswith("stop was asked for; nothing was saved at its end")


def test_a_run_that_is_given_up_is_saved_too():
    host = train(min=3)
    for number in range(4):
        host.exit(f"train.0.{number}", code=1, error=f"ValueError: {number}")
        host.advance(60.0)
        host.start()
        if number < 3:
            enter(host, f"train.0.{number + 1}", number + 2)
            host.report("progressed", f"train.0.{number + 1}", step=1)
    for index in (1, 2):
        host.exit(f"train.{index}.0", signal=15)
    host.start(saver(host))
    host.report("saved", "train.0.4", step=5, path="/p")
    host.exit("train.0.4", signal=15)
    assert host.ended.outcome == "failed"


def test_a_run_whose_ranks_all_raise_is_saved_when_it_is_given_up():
    """The last ones end after the stop, and by what they raise, not because they could not save."""
    host = train()
    for number in range(2):
        for index in range(3):
            host.exit(f"train.{index}.{number}", code=1, error="KeyError: 'same'")
        if not number:
            host.advance(60.0)
            host.start()
            for index in range(3):
                enter(host, f"train.{index}.1", 2)
    name = saver(host)
    host.start(name)
    host.exit(name, code=1, error="OSError: no space left on device")
    assert host.waiting() == []
    assert host.ended.outcome == "failed"


# --- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "bounds", "what"),
    [
        (9, {}, "train cannot have 9 ranks: it has 8 lanes\n  fix: use 8 or fewer"),
        (1, {"least": 2}, "fix: use 2 or more"),
        (2, {"least": 3, "most": 3, "why": "recovery is off"}, "resume it with another number"),
    ],
)
def test_sizes_beyond_what_the_trainer_can_use_are_refused_and_the_run_is_untouched(
    size, bounds, what
):
    host = train()
    host.report("bounded", "train.0.0", **{**BOUNDS, **bounds}, keeps_state=True)
    before = len(host.log)
    with pytest.raises(ConfigError) as refused:
        host.coordinator.scale(host.now, host.run, size)
    assert what in str(refused.value)
    assert len(host.log) == before
    host.take(host.coordinator.scale(host.now, host.run, 3)[1])


def test_bounds_are_known_from_the_log_and_said_once():
    host = train()
    assert len(host.facts(GangBounded)) == 1
    host.restart_controller()
    with pytest.raises(ConfigError, match="8 lanes"):
        host.coordinator.scale(host.now, host.run, 9)


# --- members that never come to train ---------------------------------------------------------------


def test_a_member_that_joins_and_never_enters_is_suspected_when_others_have():
    host = train()
    host.exit("train.1.0", signal=9)
    host.advance(1.0)
    host.start()
    host.report("joined", "train.1.1", generation=2)
    host.advance(290.0)
    assert host.facts(AttemptSuspected) == []
    host.advance(20.0)
    (fact,) = host.facts(AttemptSuspected)
    assert fact.attempt.endswith("train.1.1")
    assert "not come to train within 300 s" in fact.reason
    host.advance(2.0)
    assert host.wanted("kill") == ["train.1.1"]


def test_a_slow_beginning_teaches_patience_and_nobody_is_suspected_before_the_first_has_entered():
    host = ScriptedHost()
    host.submit({"train": RoleSpec(command=["x"], gang=True, count=2)})
    host.start()
    for index in range(2):
        host.report("joined", f"train.{index}.0", generation=1)
    host.advance(1000.0)
    enter(host, "train.0.0")
    host.advance(3000.0)
    assert host.facts(AttemptSuspected) == []
    host.advance(400.0)
    (fact,) = host.facts(AttemptSuspected)
    assert fact.attempt.endswith("train.1.0")
