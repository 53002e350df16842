"""What a rank thinks of those that keep it waiting."""

from argosy.train.suspicions import Glance, Suspicions


def _look(state="R", ticks=0, beats=0, **more):
    return Glance(state=state, ticks=ticks, beats=beats, **{"is_outside": False, **more})


def _suspicions():
    found = Suspicions(first_seconds=300.0, more_seconds=1.0)
    found.learn(5.0)
    found.learn(0.1)
    found.begin(0.0)
    return found


def test_the_rest_of_a_step_that_was_under_way_when_one_came_is_no_measure():
    found = Suspicions(first_seconds=300.0, more_seconds=1.0)
    found.learn(0.01)
    assert found.median_seconds == 0.0
    found.learn(3.0)
    assert found.median_seconds == 3.0
    found.begin(0.0)
    found.judge(0.0, 1, 11, _look("S", ticks=7))
    assert not found.judge(4.0, 1, 11, _look("S", ticks=7))
    assert "no CPU" in found.judge(10.1, 1, 11, _look("S", ticks=7))


def test_who_comes_back_from_between_two_steps_has_its_own_time_to_compute():
    found = _suspicions()
    for at in range(1, 45):
        assert not found.judge(float(at), 1, 11, _look(ticks=at, is_outside=True))
    for at in range(45, 118):
        assert not found.judge(float(at), 1, 11, _look(ticks=at))
    assert "computes without an end" in found.judge(120.0, 1, 11, _look(ticks=120))


def test_who_waited_itself_has_its_own_time_too():
    found = _suspicions()
    for at in range(1, 90):
        found.judge(float(at), 1, 11, _look("S", beats=at))
    assert not found.judge(91.0, 1, 11, _look(ticks=1, beats=89))


def test_an_accusation_is_said_again_only_after_a_while():
    found = _suspicions()
    assert found.judge(2.0, 1, 11, _look("T"))
    assert found.is_accused(10.0, 11)
    assert not found.is_accused(20.0, 11)


def test_work_that_is_no_steps_begins_the_wait_anew():
    found = _suspicions()
    found.note_work(0.5, [1, 1])
    found.note_work(1.5, [1, 2])
    assert not found.judge(2.0, 1, 11, _look("T"))
    assert found.judge(3.0, 1, 11, _look("T"))


def test_one_whose_loop_is_over_is_not_accused_by_one_who_comes_late():
    found = _suspicions()
    assert not found.judge(9000.0, 1, 11, _look("S", is_outside=True, is_done=True))
