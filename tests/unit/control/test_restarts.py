from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.spec import Backoff, Budget, RoleSpec, RunSpec
from argosy.control.restarts import (
    History,
    Life,
    Tally,
    classify,
    describe,
    describe_restart,
    exit_code,
    first_cause,
    in_force,
    policy_of,
    severity,
    wait_seconds,
    why_given_up,
)
from argosy.protocol.facts import AttemptExited


def exit(attempt="a", **more):
    return AttemptExited(attempt=attempt, run="r", **more)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"code": 0}, None),
        ({"code": 1}, "user"),
        ({"signal": 11}, "user"),
        ({"signal": 6}, "user"),
        ({"signal": 9}, "host"),
        ({"is_oom": True, "signal": 9}, "host"),
        ({"lost": True}, "host"),
        ({"signal": 15}, "preemption"),
        ({"hung": True, "signal": 9}, "hang"),
        ({"error": "No such file"}, "user"),
    ],
)
def test_every_exit_has_a_class(fields, expected):
    assert classify(exit(**fields)) == expected


def test_a_gang_without_a_policy_is_transient():
    assert policy_of(RoleSpec(command=["x"], gang=True)) == "transient"
    assert policy_of(RoleSpec(command=["x"], gang=True, restart="permanent")) == "permanent"
    assert policy_of(RoleSpec(command=["x"], gang=True, restart="temporary")) == "temporary"
    assert policy_of(RoleSpec(command=["x"])) == "temporary"


def test_a_role_of_a_service_is_restarted_without_end_unless_it_says_otherwise():
    plain = RoleSpec(command=["x"])
    service = RunSpec(roles={"a": plain}, service=True)
    endless = in_force(service, plain)
    assert policy_of(endless) == "permanent"
    spent = Tally(in_period=2049, row=9, fruitless=9, repeated=9)
    for failure in ("user", "host", "hang", "preemption"):
        assert not why_given_up(endless, failure, spent, True)
    assert describe_restart(endless, "user", 7) == "restart 7"
    for role in (RoleSpec(command=["x"], restart="temporary"), RoleSpec(command=["x"], gang=True)):
        assert in_force(RunSpec(roles={"a": role}), role) is role
    once = RoleSpec(command=["x"], restart="temporary")
    assert in_force(service, once) is once
    bounded = in_force(service, RoleSpec(command=["x"], budget=Budget(user=5)))
    assert (policy_of(bounded), bounded.budget.user) == ("permanent", 5)


def test_causes_are_ranked_by_what_they_explain_not_by_time():
    collective = exit("c", code=1, error="torch.distributed.DistBackendError: NCCL", at=1.0)
    exception = exit("e", code=1, error="ValueError: bad", at=2.0)
    crash = exit("s", signal=11, at=3.0)
    killed = exit("k", signal=9, at=4.0)
    order = [killed, crash, exception, collective]
    assert [severity(each) for each in order] == [0, 1, 2, 3]
    while order:
        assert first_cause(order[::-1]) is order.pop(0)


def test_among_equals_the_earliest_is_the_cause():
    assert first_cause([exit("b", code=1, at=2.0), exit("a", code=1, at=1.0)]).attempt == "a"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"code": 7}, 7),
        ({"signal": 15}, 143),
        ({"lost": True}, 137),
        ({"error": "Permission denied"}, 126),
        ({"error": "No such file"}, 127),
    ],
)
def test_the_code_of_a_run_follows_the_shell(fields, code):
    assert exit_code(exit(**fields)) == code


def test_every_exit_can_be_described():
    for fields in (
        {"code": 3},
        {"signal": 9},
        {"lost": True},
        {"hung": True},
        {"is_oom": True},
        {},
    ):
        assert describe(exit(**fields))


@given(row=st.integers(0, 5000), first=st.floats(0, 100), most=st.floats(0, 100))
def test_waits_grow_and_stay_within_their_limits(row, first, most):
    backoff = Backoff(first_seconds=first, most_seconds=most, jitter=0.2)
    wait = wait_seconds(backoff, row, "run", 1)
    assert 0 <= wait <= most * 1.2 + 1e-9
    calm = Backoff(first_seconds=first, most_seconds=most, jitter=0.0)
    assert wait_seconds(calm, row) <= wait_seconds(calm, row + 1)
    assert wait == wait_seconds(backoff, row, "run", 1)


def test_the_second_restart_in_a_row_waits_even_when_the_first_does_not():
    backoff = Backoff(first_seconds=0.0, jitter=0.0)
    assert [wait_seconds(backoff, row) for row in (1, 2, 3, 4)] == [0.0, 0.5, 1.0, 2.0]


def test_kills_from_outside_do_not_count_as_failures_in_a_row():
    history, budget = History(), Budget()
    dull = Life(has_progressed=False, is_long=False)
    for _ in range(5):
        history.add(budget, 1.0, "host", dull)
    assert (history.row, history.fruitless) == (0, 0)
    history.add(budget, 1.0, "user", dull)
    assert history.row == 1
    assert history.peek(budget, 1.0, "host", dull).in_period == 6


def test_many_kills_in_a_short_time_are_a_loop_whose_next_start_waits():
    history, budget = History(), Budget()
    dull = Life(has_progressed=False, is_long=False)
    for number in range(7):
        history.add(budget, 1.0 + number, "host", dull)
    assert [history.row_of_kills(at, "host") for at in (7.0, 14.0, 100.0)] == [2, 1, 1]
    assert history.row_of_kills(7.0, "preemption") == 1


def test_progress_resets_the_row():
    history, budget = History(), Budget()
    for _ in range(3):
        history.add(budget, 1.0, "user", Life(has_progressed=False, is_long=False))
    assert (history.row, history.fruitless) == (3, 3)
    history.add(budget, 1.0, "user", Life(has_progressed=True, is_long=False))
    assert (history.row, history.fruitless) == (1, 0)


def test_lack_of_progress_counts_only_for_programs_that_show_it():
    role = RoleSpec(command=["x"], restart="transient", budget=Budget(user=9, no_progress=2))
    tally = Tally(in_period=2, row=2, fruitless=2)
    assert why_given_up(role, "user", tally, True)
    assert not why_given_up(role, "user", tally, False)
    assert not why_given_up(role, "host", tally, True)
