from dataclasses import fields, replace

import pytest

from argosy.errors import LEFT_CODE
from argosy.protocol.savers import (
    MOST_STARTS,
    Legacy,
    has_finished,
    is_answer,
    needs_saver,
    saver_seconds,
    was_unlucky,
)

UNSAVED = Legacy(
    has_entered=True, keeps_state=True, has_saved=False, has_finished=False, has_answered=False
)


def test_what_was_trained_and_is_still_there_needs_a_saver():
    assert needs_saver(UNSAVED, [])


@pytest.mark.parametrize("name", [field.name for field in fields(Legacy)])
def test_each_fact_alone_makes_a_saver_needless(name):
    assert not needs_saver(replace(UNSAVED, **{name: not getattr(UNSAVED, name)}), [])


def test_another_saver_is_started_after_bad_luck_alone_and_not_for_ever():
    assert needs_saver(UNSAVED, [True] * (MOST_STARTS - 1))
    assert not needs_saver(UNSAVED, [True] * MOST_STARTS)
    assert not needs_saver(UNSAVED, [True, False])


@pytest.mark.parametrize(
    ("ended_well", "saved_by", "is_done"),
    [
        ({"a": True, "b": True}, "", True),
        ({"a": True, "b": False}, "a", True),
        ({"a": False, "b": True}, "a", True),
        ({"a": True, "b": False}, "", False),
        ({"a": True, "b": False}, "older", False),
        ({"a": False, "b": False}, "a", False),
    ],
)
def test_a_gang_has_finished_when_all_have_or_one_has_and_a_member_saved(
    ended_well, saved_by, is_done
):
    assert has_finished(ended_well, 2, saved_by) == is_done


def test_an_answer_is_a_failure_by_itself():
    assert [is_answer(code) for code in (0, 1, LEFT_CODE, None)] == [False, True, False, False]


def test_bad_luck_is_a_kill_from_outside_or_no_start_at_all():
    ends = [(None, 9), (None, None), (None, 15), (1, None), (0, None)]
    assert [was_unlucky(*end) for end in ends] == [True, True, False, False, False]


def test_a_saver_has_its_grace_and_the_time_of_three_slow_starts():
    assert saver_seconds(30.0, 60.0) == 210.0
