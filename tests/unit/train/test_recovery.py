"""When a silent member is taken for hung."""

from argosy.train.recovery import Limits, Sighting, accuse, judge_failure

LIMITS = Limits(median=0.1, more=1.0, first=300.0)


def _seen(at, ticks, state, **more):
    return Sighting(at=at, ticks=ticks, state=state, **more)


def test_a_stopped_member_is_accused_after_three_medians_and_a_little_more():
    before = _seen(0.0, 10, "R")
    assert not accuse(1.2, before, _seen(1.2, 10, "T"), LIMITS)
    assert "stopped" in accuse(1.4, before, _seen(1.4, 10, "T"), LIMITS)


def test_one_that_sleeps_without_using_cpu_is_accused():
    assert "no CPU" in accuse(2.0, _seen(0.5, 10, "S"), _seen(2.0, 10, "S"), LIMITS)


def test_one_that_has_just_used_cpu_is_given_time():
    assert not accuse(2.0, _seen(1.9, 11, "S"), _seen(2.0, 11, "S"), LIMITS)


def test_one_that_waits_for_a_core_or_a_disk_is_not_hung():
    for state in "RD":
        assert not accuse(5.0, _seen(0.0, 10, state), _seen(5.0, 10, state), LIMITS)


def test_one_that_computes_without_an_end_is_accused_in_the_end():
    assert not accuse(20.0, _seen(20.0, 2000, "R"), _seen(20.0, 2000, "R"), LIMITS)
    assert "without an end" in accuse(100.0, _seen(100.0, 9, "R"), _seen(100.0, 9, "R"), LIMITS)


def test_one_that_waits_for_others_itself_is_not_at_fault():
    before = _seen(0.0, 10, "S")
    waiting = Sighting(at=100.0, ticks=10, state="S", is_waiting=True)
    assert not accuse(100.0, before, waiting, LIMITS)
    assert "waits without an end" in accuse(1000.0, before, waiting, LIMITS)


def test_before_the_first_step_compilation_is_given_its_time():
    first = Limits(median=0.0, more=1.0, first=300.0)
    assert not accuse(200.0, _seen(0.0, 1, "T"), _seen(200.0, 1, "T"), first)
    assert accuse(301.0, _seen(0.0, 1, "T"), _seen(301.0, 1, "T"), first)


def test_one_that_has_ended_is_nobody_to_accuse():
    assert not accuse(1000.0, _seen(0.0, 1, "S"), _seen(1000.0, 0, ""), LIMITS)


def test_a_lane_that_raises_again_elsewhere_ends_the_run():
    assert judge_failure(is_repeated=False) == "leave"
    assert judge_failure(is_repeated=True) == "fail"


def test_one_that_uploads_between_two_steps_is_left_in_peace_for_a_while():
    def look(at, state="S"):
        return accuse(at, _seen(0.0, 10, "S"), _seen(at, 10, state, is_outside=True), LIMITS)

    assert not look(30.0)
    assert look(70.0)
    assert "stopped" in look(2.0, state="T")


def test_one_that_computes_between_two_steps_has_much_time_and_not_for_ever():
    def look(at):
        return accuse(at, _seen(at, 9, "R"), _seen(at, 9, "R", is_outside=True), LIMITS)

    assert not look(500.0)
    assert "in user code without an end" in look(800.0)
