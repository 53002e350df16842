"""How often to save: near the best interval, within bounds, the same on all ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint.boards import Group
from argosy.checkpoint.intervals import Failures, Interval, Past, interval_seconds, lost_share
from argosy.checkpoint.schedules import Schedule
from argosy.errors import ConfigError


@settings(max_examples=40, deadline=None)
@given(st.floats(0.01, 100), st.floats(1000, 1e6))
def test_no_other_interval_loses_noticeably_less(cost, between):
    chosen = interval_seconds(cost, between)
    least = lost_share(chosen, cost, between)
    for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0):
        assert least <= lost_share(chosen * factor, cost, between) + 1e-3


@settings(max_examples=40, deadline=None)
@given(st.floats(0.001, 1e4), st.floats(1, 1e7))
def test_the_interval_is_positive_and_grows_with_both(cost, between):
    chosen = interval_seconds(cost, between)
    assert chosen > 0
    assert interval_seconds(cost, between * 2) >= chosen


def test_youngs_estimate_is_the_limit_for_cheap_saves():
    assert interval_seconds(1e-6, 1e6) == pytest.approx((2 * 1e-6 * 1e6) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(("cost", "between"), [(-1.0, 10.0), (1.0, 0.0), (float("nan"), 1.0)])
def test_impossible_times_are_refused(cost, between):
    with pytest.raises(ConfigError):
        interval_seconds(cost, between)


def test_failures_that_come_bring_saves_closer():
    interval = Interval(Failures(expected_seconds=86400))
    interval.saw_steps(100, 100.0)
    interval.saw_save(2.0)
    calm = interval.steps()
    interval.failures.before = Past(failures=20, watched_seconds=3600.0)
    assert interval.steps() < calm / 3
    said = interval.statistics()
    assert said["interval_steps"] == interval.steps()
    assert (said["failures"], said["watched_seconds"]) == (20, 3700)
    assert said["failure_seconds"] == pytest.approx((86400 + 3700) / 21)


def test_time_without_failures_takes_saves_apart():
    few, many = Failures(Past(failures=3)), Failures(Past(failures=3, watched_seconds=1e6))
    assert Interval(many).failures.seconds > few.seconds


LIVES = st.lists(
    st.tuples(st.lists(st.floats(0, 1e5), max_size=5), st.booleans(), st.floats(0, 1e6)),
    max_size=12,
)


@given(LIVES)
def test_each_session_that_did_not_end_is_counted_once_and_the_time_between_them_never(lives):
    past, now = Past(), 1e9
    for stretches, is_clean, pause in lives:
        past = past.resumed().noted(now, 0.0)
        for seconds in stretches:
            now += seconds
            past = past.noted(now, seconds)
        past = past.ended(now, 0.0) if is_clean else past
        now += pause
    found = past.resumed()
    assert found.resumed() == found
    assert found.failures == sum(not is_clean for _, is_clean, _ in lives)
    assert found.watched_seconds == pytest.approx(sum(sum(one) for one, _, _ in lives), abs=1e-3)


def test_a_clock_that_was_set_counts_no_more_than_has_passed():
    past = Past().noted(1000.0, 0.0)
    assert past.noted(900.0, 60.0).watched_seconds == 0.0
    assert past.noted(1e9, 60.0).watched_seconds == 60.0


def test_saves_are_never_closer_than_they_take_to_become_durable():
    interval = Interval(Failures(expected_seconds=5.0))
    interval.saw_steps(10, 10.0)
    interval.saw_save(0.0001)
    interval.saw_durable(30.0)
    assert interval.steps() == 30


def test_a_save_that_no_step_waits_for_is_not_free():
    interval = Interval()
    interval.saw_steps(1000, 10.0)
    for _ in range(20):
        interval.saw_save(0.0)
        interval.saw_durable(0.5)
    # Else one would follow the other without a pause.
    assert interval.seconds > 60
    interval.saw_save(5.0)
    slow = interval.seconds
    interval.saw_durable(0.5)
    assert interval.seconds == slow, "what was measured counts when it is more"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_schedule_counts_steps_between_saves():
    clock = Clock()
    schedule = Schedule(Interval(first_seconds=20.0, most_seconds=50.0), Group(), clock=clock)
    due = []
    for step in range(200):
        if schedule.is_due(step):
            due.append(step)
            schedule.requested(step)
            clock.now += 3.0
            schedule.saved(3.0)
        clock.now += 1.0
    assert due == [20, 40, 90, 140, 190]
