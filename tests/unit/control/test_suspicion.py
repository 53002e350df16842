"""A member that accuses another one, and one that gives the whole run up."""

from __future__ import annotations

import pytest

from argosy.config.spec import Backoff, Budget, RoleSpec
from argosy.control.keeperevents import observation_of
from argosy.protocol.facts import (
    AttemptExited,
    AttemptStopping,
    AttemptSuspected,
    EvidenceKept,
    GenerationFormed,
    StopRequested,
)
from argosy.testing.scripted import ScriptedHost

AT_ONCE = Backoff(first_seconds=0.0, jitter=0.0)


def begin(*, count=4, joined=True, **more):
    host = ScriptedHost()
    role = RoleSpec(command=["x"], gang=True, count=count, backoff=AT_ONCE, **more)
    host.submit({"train": role})
    host.start()
    if joined:
        for index in range(count):
            host.report("joined", f"train.{index}.0", generation=1)
    return host


def keep_evidence(host, attempt):
    outputs = host.coordinator.keep_evidence(
        host.now, f"{host.run}.{attempt}", path="stacks.json", error=""
    )
    host.take(outputs)


def test_a_suspect_is_killed_as_hung_once_the_evidence_is_kept():
    host = begin()
    host.report("suspected", "train.0.0", rank=2, generation=1, reason="no lane for 3 s")
    assert host.wanted("kill") == []
    keep_evidence(host, "train.2.0")
    assert host.wanted("kill") == ["train.2.0"]
    stopping = host.facts(AttemptStopping)[-1]
    assert (stopping.failure, stopping.reason) == ("hang", "no lane for 3 s")
    host.exit("train.2.0", signal=9)
    assert host.facts(AttemptExited)[-1].hung
    assert host.waiting() == ["train.2.1"], "the others go on, it is replaced"
    assert host.wanted("term") == []


def test_a_suspect_is_killed_without_evidence_after_a_second():
    host = begin()
    host.report("suspected", "train.0.0", rank=2, generation=1, reason="")
    host.advance(0.9)
    assert host.wanted("kill") == []
    host.advance(0.2)
    assert host.wanted("kill") == ["train.2.0"]
    assert host.facts(EvidenceKept) == []


def test_several_accusers_of_one_suspect_make_one_suspicion():
    host = begin()
    for accuser in (0, 1, 3):
        host.report("suspected", f"train.{accuser}.0", rank=2, generation=1, reason="")
    assert len(host.facts(AttemptSuspected)) == 1


@pytest.mark.parametrize(
    "accusation",
    [
        {"rank": 2, "generation": 0},  # of a generation that is over
        {"rank": 2, "generation": 2},  # of one that is not there yet
        {"rank": 9, "generation": 1},  # nobody has this rank
        {"rank": 0, "generation": 1},  # itself
    ],
)
def test_accusations_that_cannot_be_meant_are_ignored(accusation):
    host = begin()
    host.report("suspected", "train.0.0", reason="", **accusation)
    assert host.facts(AttemptSuspected) == []


def test_a_replacement_is_not_killed_for_what_the_one_before_it_did():
    host = begin()
    host.exit("train.2.0", signal=9)
    host.start()
    host.report("suspected", "train.0.0", rank=2, generation=1, reason="")
    assert host.facts(AttemptSuspected) == []
    host.report("suspected", "train.0.0", rank=2, generation=2, reason="")
    assert [fact.attempt for fact in host.facts(AttemptSuspected)] == [f"{host.run}.train.2.1"]


def test_a_generation_is_not_formed_with_a_suspect_that_is_about_to_be_killed():
    host = begin()
    host.report("suspected", "train.0.0", rank=2, generation=1, reason="")
    host.exit("train.3.0", signal=9)
    assert len(host.facts(GenerationFormed)) == 1
    assert host.wanted("term") == []
    keep_evidence(host, "train.2.0")
    host.exit("train.2.0", signal=9)
    assert host.facts(GenerationFormed)[-1].members == [0, 1, 2, 3]
    assert sorted(host.waiting()) == ["train.2.1", "train.3.1"]


def test_a_new_controller_kills_a_suspect_whose_evidence_was_lost_with_the_old_one():
    host = begin()
    host.report("suspected", "train.0.0", rank=2, generation=1, reason="")
    host.restart_controller()
    host.advance(1.1)
    assert host.wanted("kill") == ["train.2.0"]


def test_hangs_spend_their_budget():
    host = begin(count=2, budget=Budget(hang=0))
    host.report("suspected", "train.0.0", rank=1, generation=1, reason="")
    host.advance(1.1)
    host.exit("train.1.0", signal=9)
    assert host.facts(StopRequested)[-1].failed
    assert "hangs" in host.facts(StopRequested)[-1].reason


def test_a_program_that_gives_up_ends_the_run_with_its_reason_and_without_a_restart():
    host = begin()
    host.exit("train.3.0", signal=9)
    host.start()
    host.report("gave_up", "train.1.0", reason="loss() raised on every rank: ValueError")
    for name in host.wanted("term"):
        host.exit(name, signal=15)
    ended = host.ended
    assert (ended.outcome, ended.exit_code) == ("failed", 1)
    assert ended.first_cause == f"{host.run}.train.1.0"
    assert ended.reason == "rank 1: loss() raised on every rank: ValueError"
    assert host.waiting() == []


def test_a_run_that_is_given_up_because_a_rank_has_ended_has_that_end_as_its_first_cause():
    host = begin()
    host.exit("train.3.0", signal=9)
    host.start()
    host.report("gave_up", "train.1.0", reason="rank 3 has ended", rank=3)
    for name in host.wanted("term"):
        host.exit(name, signal=15)
    ended = host.ended
    assert (ended.outcome, ended.exit_code) == ("failed", 137)
    assert ended.first_cause == f"{host.run}.train.3.0"
    assert ended.reason == "rank 1: rank 3 has ended"


def test_the_exit_code_of_one_that_gives_up_and_leaves_is_its_own():
    host = begin(count=2)
    host.report("gave_up", "train.1.0", reason="no use")
    host.exit("train.1.0", code=3)
    host.exit("train.0.0", signal=15)
    assert (host.ended.outcome, host.ended.exit_code) == ("failed", 3)


def test_a_program_that_refuses_its_input_names_the_exit_code_however_the_ranks_end():
    host = begin(count=2)
    host.report("gave_up", "train.1.0", reason="unknown key", code=64)
    # It was told to end before it had left by itself.
    host.exit("train.1.0", signal=15)
    host.exit("train.0.0", code=64)
    assert (host.ended.outcome, host.ended.exit_code) == ("failed", 64)


def test_a_later_word_does_not_change_why_a_run_was_given_up():
    host = begin(count=2)
    host.report("gave_up", "train.1.0", reason="first")
    host.report("gave_up", "train.0.0", reason="second")
    host.stop(hard=True)
    assert len([fact for fact in host.facts(StopRequested) if fact.failed]) == 1
    for name in host.wanted("kill"):
        host.exit(name, signal=9)
    assert (host.ended.outcome, host.ended.reason) == ("failed", "rank 1: first")


@pytest.mark.parametrize(
    "message",
    [
        {"say": "suspect", "rank": "two", "generation": 1},
        {"say": "suspect", "rank": -1, "generation": 1},
        {"say": "suspect", "generation": 1},
        {"say": "suspect", "rank": 1, "generation": 1 << 70},
    ],
)
def test_words_of_the_wrong_type_tell_nothing(message):
    event = {"event": "link", "attempt": "r1.train.0.0", "run": "r1", "message": message}
    assert observation_of(1, event) is None


def test_words_of_a_worker_become_observations():
    def told(message):
        event = {"event": "link", "attempt": "r1.train.0.0", "run": "r1", "message": message}
        return observation_of(1, event)

    suspected = told({"say": "suspect", "rank": 2, "generation": 3, "reason": "\ud800"})
    assert suspected.kind == "suspected"
    assert suspected.data == {"rank": 2, "generation": 3, "reason": "?"}
    given_up = told({"say": "fail", "reason": "x" * 10_000})
    assert given_up.kind == "gave_up"
    assert len(given_up.data["reason"]) == 8 << 10
    assert told({"say": "fail", "code": 64}).data == {"reason": "", "code": 64}
    assert told({"say": "fail", "rank": 3}).data == {"reason": "", "rank": 3}
    for code in (0, 256, "64", None):
        assert told({"say": "fail", "code": code}).data == {"reason": ""}


def test_a_replacement_that_never_joins_is_suspected_although_no_peer_knows_it():
    host = begin()
    host.exit("train.2.0", signal=9)
    host.start()
    host.advance(119.0)
    assert host.facts(AttemptSuspected) == []
    host.advance(3.0)
    [fact] = host.facts(AttemptSuspected)
    assert (fact.attempt, fact.by) == (f"{host.run}.train.2.1", "")
    assert host.wanted("kill") == ["train.2.1"]


def test_a_program_that_joins_nowhere_is_not_suspected():
    host = begin(joined=False)
    host.advance(1000.0)
    assert host.facts(AttemptSuspected) == []
