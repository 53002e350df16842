import pytest

from argosy.worker.failures import LONG_SECONDS, Failures, Life
from argosy.worker.members import Exit
from argosy.worker.upkeep import Start, Upkeep

SAID = "Traceback\nConnectionError: the server hung up"


def life(error=SAID, *, since, is_long=False, has_progressed=False):
    return Life(error=error, since=since, is_long=is_long, has_progressed=has_progressed)


def fail(failures, *lives, failure="user"):
    """Why there is no further start after each of these."""
    found = []
    for number, each in enumerate(lives, start=1):
        failures.add(failure, float(number), each, number)
        found.append(failures.why_given_up(failure, each))
    return found


def test_the_same_words_of_two_short_lives_are_enough():
    first, second = fail(Failures(1), life(since=1), life(since=2))
    assert first == ""
    assert "failed twice in the same way" in second


@pytest.mark.parametrize("between", ["long", "other words", "a step"])
def test_words_count_only_in_a_row_of_short_lives(between):
    failures = Failures(1)
    lives = [life(since=1), life(since=2), life(since=3)]
    if between == "long":
        lives[1] = life(since=2, is_long=True)
    elif between == "other words":
        lives[1] = life("ValueError: x", since=2)
    else:
        fail(failures, lives.pop(0))
        failures.note_step()
        lives.pop()
    assert fail(failures, *lives) == [""] * len(lives)


def test_what_all_ranks_raise_is_one_failure():
    failures = Failures(4)
    for rank in range(4):
        failures.add("user", 10.0 + rank / 10, life(since=1), 1 + rank)
    for rank in range(4):
        failures.add("user", 100.0 + rank, life(since=5), 5 + rank)
    assert failures.statistics()["user"] == 2
    assert "failed twice in the same way" in failures.why_given_up("user", life(since=5))


def test_a_survivor_that_fails_after_a_step_or_later_in_another_way_is_counted():
    failures = Failures(2)
    failures.add("user", 10.0, life(since=1), 1)
    failures.add("user", 20.0, life("ValueError: x", since=1), 2)
    failures.note_step()
    failures.add("user", 30.0, life("ValueError: x", since=1), 3)
    assert failures.statistics()["user"] == 3


def test_an_error_of_the_source_after_a_long_life_may_not_come_again():
    said = "NameError: name 'x' is not defined"
    assert fail(Failures(1), life(said, since=1)) != [""]
    assert fail(Failures(1), life(said, since=1, is_long=True)) == [""]
    assert fail(Failures(1), life(said, since=1, has_progressed=True)) == [""]


def test_the_budget_of_a_class_is_its_own_and_of_one_period():
    failures = Failures(1)
    lives = [life(f"E: {number}", since=number) for number in range(1, 5)]
    assert fail(failures, *lives)[2:] == [
        "",
        "the budget of 3 restarts after failures of the program is spent",
    ]
    assert fail(failures, life(since=5), failure="host") == [""]
    assert failures.statistics() == {"user": 4, "host": 1, "hang": 0}
    failures.add("user", 10_000.0, life(since=6), 6)
    assert failures.describe_restart("user") == "restart 1 of 3"


def test_a_program_that_works_for_hours_between_like_failures_is_started_again():
    upkeep, at = Upkeep(1), 0.0
    actions = upkeep.begin(at)
    for _ in range(6):
        start = next(action for action in actions if isinstance(action, Start))
        at += max(7200.0, LONG_SECONDS)
        actions = upkeep.exited(start.attempt, Exit(1, None, SAID), at)
        if upkeep.due is not None:
            actions += upkeep.passed(upkeep.due)
        assert upkeep.end is None
