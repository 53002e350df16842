"""Faults on purpose: who is told what, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.config.spec import Backoff, RoleSpec
from argosy.control.faults import (
    DRAWN,
    POINTS,
    FaultOrder,
    draw_faults,
    left_over,
    settle_steps,
)
from argosy.errors import ConfigError, NotFoundError
from argosy.protocol.facts import AttemptExited, FaultInjected, FaultMet
from argosy.testing.scripted import ScriptedHost

AT_ONCE = Backoff(first_seconds=0.0, jitter=0.0)


def begin(*, joined=True):
    host = ScriptedHost()
    host.submit({"train": RoleSpec(command=["x"], gang=True, count=4, backoff=AT_ONCE)})
    host.start()
    if joined:
        for index in range(4):
            host.report("joined", f"train.{index}.0", generation=1)
    return host


def inject(host, *orders):
    faults, outputs = host.coordinator.inject(host.now, host.run, list(orders))
    host.take(outputs)
    return faults


def told(host, attempt):
    return [(fault["kind"], fault["step"], fault["point"]) for fault in host.want(attempt).faults]


@given(
    seed=st.integers(0, 1 << 40),
    count=st.integers(1, 40),
    world_size=st.integers(1, 16),
    first=st.integers(0, 1000),
    length=st.integers(0, 1000),
)
def test_random_faults_are_a_function_of_the_seed_and_lie_where_they_should(
    seed, count, world_size, first, length
):
    arguments = (seed, count, world_size, (first, first + length))
    drawn = draw_faults(*arguments)
    assert drawn == draw_faults(*arguments)
    assert len(drawn) == count
    for order in drawn:
        assert order.fault in DRAWN
        assert order.point in POINTS
        assert 0 <= order.rank < world_size
        assert first <= order.step <= first + length
        assert (order.seconds > 0) == (order.fault == "slow")
    assert [order.step for order in drawn] == sorted(order.step for order in drawn)


def test_another_seed_draws_other_faults():
    assert draw_faults(7, 5, 4, (1, 100)) != draw_faults(8, 5, 4, (1, 100))


def test_a_rank_is_told_what_to_break_in_itself():
    host = begin()
    [fault] = inject(host, FaultOrder(fault="kill", rank=2, step=40, point="update"))
    assert fault.is_told
    assert told(host, "train.2.0") == [("kill", 40, "update")]
    assert host.want("train.2.0").faults[0]["number"] == fault.number
    assert told(host, "train.1.0") == []


def test_kill_and_stop_without_a_step_are_not_told():
    host = begin(joined=False)
    faults = inject(host, FaultOrder(fault="kill", rank=2), FaultOrder(fault="stop", rank=1))
    assert not any(fault.is_told for fault in faults)
    assert [fault.attempt for fault in faults] == [f"{host.run}.train.{i}.0" for i in (2, 1)]
    assert [fact.number for fact in host.facts(FaultInjected)] == [f.number for f in faults]
    assert told(host, "train.2.0") == []


def test_faults_are_told_again_by_a_new_controller():
    host = begin()
    inject(host, FaultOrder(fault="nan", rank=1, step=3))
    host.wants.clear()
    host.restart_controller()
    assert told(host, "train.1.0") == [("nan", 3, None)]


def test_what_a_killed_rank_did_not_come_to_is_told_to_its_successor_when_it_has_joined():
    host = begin()
    inject(
        host,
        FaultOrder(fault="slow", rank=2, step=5, seconds=1.0),
        FaultOrder(fault="kill", rank=2, step=10),
        FaultOrder(fault="kill", rank=2, step=20),
    )
    host.exit("train.2.0", signal=9)
    host.start()
    assert told(host, "train.2.1") == []
    host.report("joined", "train.2.1", generation=2)
    assert told(host, "train.2.1") == [("kill", 20, None)]
    numbers = [fact.number for fact in host.facts(FaultInjected)]
    assert len(numbers) == 4
    assert numbers[-1] == numbers[2]
    host.exit("train.2.1", signal=9)
    host.start()
    host.report("joined", "train.2.2", generation=3)
    assert told(host, "train.2.2") == []


@given(st.lists(st.tuples(st.sampled_from(["kill", "slow", "nan", "raise"]), st.integers(0, 9))))
def test_each_death_uses_up_at_least_one_deadly_fault(faults):
    given_faults = [
        FaultInjected(run="r", number=number, fault=kind, step=step)
        for number, (kind, step) in enumerate(faults)
    ]
    left = left_over(given_faults)
    deadly = [fault for fault in given_faults if fault.fault in ("kill", "raise")]
    assert len([f for f in left if f in deadly]) < max(1, len(deadly))
    assert left_over([]) == []


@pytest.mark.parametrize(
    ("order", "what"),
    [
        (FaultOrder(fault="kill"), "names no rank"),
        (FaultOrder(fault="stop", part="keeper"), "only be killed"),
        (FaultOrder(fault="kill", part="keeper", step=3), "only be killed"),
        (FaultOrder(fault="kill", part="kernel"), "no part 'kernel'"),
        (FaultOrder(fault="slow", rank=1), "how slow"),
        (FaultOrder(fault="kill", rank=1, seconds=2.0), "mean nothing"),
        (FaultOrder(fault="kill", rank=1, point="vote"), "of which step"),
        (FaultOrder(fault="kill", rank=1, role="db"), "no role 'db'"),
        (FaultOrder(fault="kill", rank=4), "no live rank 4"),
    ],
)
def test_faults_that_make_no_sense_are_refused_and_nothing_is_recorded(order, what):
    host = begin()
    good = FaultOrder(fault="kill", rank=0, step=9)
    with pytest.raises((ConfigError, NotFoundError), match=what):
        inject(host, good, order)
    assert host.facts(FaultInjected) == []


def test_a_step_that_is_over_is_refused_with_the_present_one():
    at_once, later = FaultOrder(fault="kill", rank=0), FaultOrder(fault="kill", rank=0, step=7)
    assert settle_steps([at_once, later], {None: 7}) == [at_once, later]
    with pytest.raises(ConfigError, match="step 7 is over: the run is at step 8") as caught:
        settle_steps([at_once, later], {None: 8})
    assert "after 8" in caught.value.fix


def test_a_rank_that_has_not_joined_cannot_be_told_of_a_fault_and_may_be_later():
    host = begin(joined=False)
    for order in (FaultOrder(fault="kill", rank=1, step=3), FaultOrder(fault="nan", rank=1)):
        with pytest.raises(ConfigError, match="rank 1 of train has not joined") as caught:
            inject(host, order)
        assert "try again when its trainer has begun" in caught.value.fix


def test_parts_of_the_runtime_are_recorded_without_a_rank():
    host = begin()
    [fault] = inject(host, FaultOrder(fault="kill", part="agent"))
    assert (fault.part, fault.attempt, fault.rank) == ("agent", "", None)
    assert not fault.is_told


def test_a_rank_that_comes_to_its_fault_says_so_and_only_of_what_it_was_told():
    host = begin()
    [fault] = inject(host, FaultOrder(fault="nan", rank=2, step=5))
    host.report("met", "train.2.0", number=fault.number)
    host.report("met", "train.1.0", number=fault.number)
    host.report("met", "train.2.0", number=fault.number + 1)
    run = host.run
    assert host.facts(FaultMet) == [
        FaultMet(run=run, attempt=f"{run}.train.2.0", number=fault.number)
    ]
    host.restart_controller()


def test_what_is_lost_with_a_keeper_that_was_killed_on_purpose_names_the_fault_in_every_run():
    host = begin()
    other = host.run
    host.submit({"main": RoleSpec(command=["x"], restart="transient")})
    host.start()
    [fault] = inject(host, FaultOrder(fault="kill", part="keeper"))
    host.restart_controller()
    host.replace_keeper()
    lost = {exit.run: exit.fault for exit in host.facts(AttemptExited)}
    assert lost == {other: fault.number, host.run: fault.number}
    before = len(host.facts(AttemptExited))
    host.start()
    host.replace_keeper()
    later = {exit.fault for exit in host.facts(AttemptExited)[before:]}
    assert later == {0}, "the next keeper ended by itself"


def test_a_run_that_has_ended_cannot_be_broken():
    host = begin()
    for index in range(4):
        host.exit(f"train.{index}.0", code=0)
    with pytest.raises(NotFoundError, match="has succeeded"):
        inject(host, FaultOrder(fault="kill", rank=1))


def test_steps_from_now_on_are_counted_from_where_the_gang_is():
    order = FaultOrder(fault="kill", role="train", rank=1, step=34, from_now=True)
    (settled,) = settle_steps([order], {"train": 126})
    assert settled == FaultOrder(fault="kill", role="train", rank=1, step=160)
