from __future__ import annotations

from argosy.testing.clock import VirtualClock


def test_things_happen_in_order_of_time_and_then_of_asking():
    clock, seen = VirtualClock(start=0.0), []
    clock.call_at(2.0, lambda: seen.append("c"))
    clock.call_at(1.0, lambda: seen.append("a"))
    clock.call_at(1.0, lambda: seen.append("b"))
    clock.run_until(1.5)
    assert (seen, clock.now) == (["a", "b"], 1.5)
    clock.run_until(3.0)
    assert seen == ["a", "b", "c"]
    assert clock.num_events == 3


def test_what_is_asked_for_the_past_happens_now():
    clock, seen = VirtualClock(start=10.0), []
    clock.call_at(1.0, lambda: seen.append(clock.now))
    assert clock.step()
    assert seen == [10.0]
    assert not clock.step()
