from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.spec import Backoff, Budget, RoleSpec
from argosy.control.restarts import (
    History,
    Life,
    Tally,
    classify,
    describe,
    exit_code,
    first_cause,
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
    assert policy_of(RoleSpec(command=["x"])) == "temporary"


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


@given(row=st.integers(0, 60), first=st.floats(0, 100), most=st.floats(0, 100))
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
