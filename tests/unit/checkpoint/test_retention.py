"""Which checkpoints may go: rules, and what no rule can take away."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import retention
from argosy.checkpoint.collection import mark
from argosy.checkpoint.retention import Keep, Known
from argosy.errors import ConfigError


def known(*steps, **more):
    return [Known(step=step, saved_at=float(step), num_bytes=10, **more) for step in steps]


def removed(held, keep, verified=None, now=0.0, free=1 << 40):
    if verified is None:
        verified = {max(one.step for one in held)}
    return [one.step for one in retention.plan(held, keep, verified, now=now, free_bytes=free)]


def test_the_newest_stay():
    assert removed(known(1, 2, 3, 4), Keep(last=2)) == [1, 2]


def test_every_nth_stays():
    assert removed(known(5, 10, 15, 20, 25), Keep(last=1, every=10)) == [5, 15]


def test_a_metric_that_no_checkpoint_has_is_no_rule():
    held = known(1, 2, 3, metrics={"loss": 1.0})
    assert removed(held, Keep(best="los")) == []
    assert removed(held, Keep(last=1, best="los")) == [1, 2]
    assert retention.is_unrated(held, Keep(best="los"))
    odd = Known(step=2, metrics={"loss": 1.0}, is_damaged=True)
    assert removed([*known(1), odd, *known(3)], Keep(best="loss")) == []
    assert not retention.is_unrated(held, Keep(best="loss"))
    assert not retention.is_unrated(held, Keep(last=1))


def test_the_best_stay_and_what_has_no_number_is_not_best():
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: math.nan}
    held = [Known(step=step, metrics={"loss": loss}) for step, loss in losses.items()]
    held.append(Known(step=5))
    assert removed(held, Keep(last=1, best="loss", best_count=2)) == [1, 4]
    assert removed(held, Keep(last=1, best="loss", best_is_highest=True)) == [2, 3, 4]


def test_without_a_rule_everything_stays():
    assert removed(known(1, 2, 3), Keep()) == []


def test_old_ones_expire_but_not_the_last():
    assert removed(known(1, 2, 3, 4), Keep(expire_seconds=10), now=13.5) == [1, 2, 3]
    assert removed(known(1, 2, 3, 4), Keep(every=1, last=2, expire_seconds=1), now=1e9) == [1, 2]


def test_nothing_goes_before_a_newer_one_is_verified():
    assert removed(known(1, 2, 3), Keep(last=1), verified=set()) == []
    assert removed(known(1, 2, 3), Keep(last=1), verified={2}) == [1]


def test_what_is_damaged_is_not_counted_and_stays_among_those_that_are():
    held = known(1, 2, 3, 4, 5)
    assert removed(held, Keep(last=2), verified={4}) == [1, 2]
    held[2] = Known(step=3, is_damaged=True)
    assert removed(held, Keep(last=2), verified={4}) == [1]
    assert removed(held, Keep(last=2), verified={5}) == [1, 2, 3]
    assert removed(held, Keep(last=4, expire_seconds=1), now=1e9) == []
    assert removed(held, Keep(last=3, every=1, expire_seconds=1), now=1e9) == [1]


def test_the_best_are_whole():
    held = [Known(step=step, metrics={"loss": float(step)}) for step in (2, 3, 4)]
    held.append(Known(step=1, metrics={"loss": 1.0}, is_damaged=True))
    assert removed(held, Keep(last=1, best="loss")) == [1, 3]


def test_pinned_ones_stay_and_what_they_need_too():
    held = [
        Known(step=1),
        Known(step=2),
        Known(step=3, is_pinned=True, needs=(1,)),
        Known(step=4),
        Known(step=5),
    ]
    assert removed(held, Keep(last=1)) == [2, 4]


def test_when_the_disk_is_nearly_full_the_oldest_go_and_the_best_last():
    held = [
        Known(step=step, num_bytes=10, metrics={"loss": abs(step - 1.0)}) for step in range(1, 6)
    ]
    keep = Keep(last=5, best="loss", free_bytes=100)
    assert removed(held, keep, free=100) == []
    assert removed(held, keep, free=85) == [2, 3]
    assert removed(held, keep, free=0) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "keep", [Keep(last=0), Keep(every=-1), Keep(expire_seconds=0.0), Keep(best=3)]
)
def test_rules_that_cannot_be_followed_are_refused(keep):
    with pytest.raises(ConfigError):
        retention.check(keep)


@st.composite
def stores(draw):
    steps = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=12)))
    return [
        Known(
            step=step,
            saved_at=float(step),
            num_bytes=draw(st.integers(0, 50)),
            metrics={"loss": draw(st.floats())} if draw(st.booleans()) else {},
            is_pinned=draw(st.booleans()),
            needs=tuple(draw(st.sets(st.sampled_from(steps[: place + 1]), max_size=2)) - {step}),
        )
        for place, step in enumerate(steps)
    ]


rules = st.builds(
    Keep,
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 7),
    best=st.none() | st.just("loss"),
    best_count=st.integers(1, 3),
    expire_seconds=st.none() | st.floats(0.5, 60),
    free_bytes=st.integers(0, 200),
)


@settings(max_examples=40, deadline=None)
@given(stores(), rules, st.data())
def test_whatever_the_rules_a_newer_verified_one_is_left_with_all_it_needs(held, keep, data):
    steps = [one.step for one in held]
    verified = data.draw(st.sets(st.sampled_from(steps)))
    free = data.draw(st.integers(0, 200))
    going = removed(held, keep, verified, now=data.draw(st.floats(0, 100)), free=free)
    assert going == sorted(set(going))
    left = set(steps) - set(going)
    for step in going:
        assert any(other > step and other in verified for other in left)
    assert not any(one.is_pinned for one in held if one.step in going)
    needs = {one.step: one.needs for one in held}
    assert mark(left, needs) <= left


@settings(max_examples=25, deadline=None)
@given(stores(), rules)
def test_cleaning_twice_removes_nothing_more(held, keep):
    now, free = 50.0, 1000
    newest = {max(one.step for one in held)}
    going = removed(held, keep, newest, now=now, free=free)
    rest = [one for one in held if one.step not in going]
    assert removed(rest, keep, newest, now=now, free=free) == []
