from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from argosy.control.outbox import FEW, MOST_ERROR_CHARACTERS, MOST_IN_REPORT, Outbox
from argosy.protocol.messages import Observed


def seen(number):
    return Observed(number=number, kind="note")


def test_what_came_before_the_first_number_was_acknowledged_by_an_earlier_agent():
    box = Outbox("k")
    assert box.add(17, seen(17))
    assert box.forgettable == 16
    assert not box.add(17, seen(17))
    assert not box.add(3, seen(3))


def test_many_wait_for_the_acknowledgement_and_few_do_not():
    box = Outbox("k")
    for number in range(1, FEW + 1):
        box.add(number, seen(number))
        assert box.unsent()
        box.take(0.0)
    box.add(FEW + 1, seen(FEW + 1))
    assert not box.unsent()
    box.acknowledge(FEW)
    assert box.unsent()
    assert [o.number for o in box.take(0.0)] == [FEW + 1]


def test_a_report_is_bounded_and_starts_with_the_oldest():
    box = Outbox("k")
    for number in range(1, 2000):
        box.add(number, seen(number))
    report = box.take(0.0)
    assert [o.number for o in report] == list(range(1, MOST_IN_REPORT + 1))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=80))
def test_nothing_is_forgotten_before_it_is_acknowledged(steps):
    box, told, acknowledged = Outbox("k"), [], 0
    for number, (is_telling, acknowledge) in enumerate(steps, start=1):
        box.add(number, seen(number) if is_telling else None)
        if is_telling:
            told.append(number)
        acknowledged = max(acknowledged, min(acknowledge, number))
        box.acknowledge(acknowledged)
        left = [each for each in told if each > acknowledged]
        assert [o.number for o in box.take(0.0)] == left
        assert not left or box.forgettable < left[0]
        through = box.take_forgettable()
        assert not through or all(each > through for each in left)


def test_a_report_with_long_errors_is_kept_short():
    box = Outbox("k")
    for number in range(1, 101):
        data = {"error": "x" * (MOST_ERROR_CHARACTERS // 10)}
        box.add(number, Observed(number=number, kind="exited", data=data))
    taken = 0
    while box.unsent():
        report = box.take(0.0)
        assert 1 <= len(report) <= 11
        taken += len(report)
        box.acknowledge(report[-1].number)
    assert taken == 100
