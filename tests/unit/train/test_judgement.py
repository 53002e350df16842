"""What is said of a step whose verdict is final."""

import math

import pytest

from argosy.errors import StepStopped
from argosy.train.guards import Guard
from argosy.train.judgement import NOTHING, Judge
from argosy.train.lanes import WHOLE
from argosy.train.settings import Settings


@pytest.mark.parametrize(("num_members", "by_whom"), [(1, ""), (2, " by other ranks")])
def test_only_where_there_are_others_a_step_is_said_to_be_computed_again_by_them(
    num_members, by_whom
):
    assert Judge.remark(7, NOTHING, 1, num_members) == (
        f"step 7: loss or gradient was not finite; computed again{by_whom} they are: "
        "a fault of the machine, which has cost nothing else"
    )


def test_nothing_is_said_of_a_step_that_was_finite_at_once():
    assert Judge.remark(7, NOTHING, 0, 2) == ""


@pytest.mark.parametrize(
    ("guard", "advice"),
    [
        (Guard(policy="stop"), "can skip or rewind instead"),
        (Guard(policy="skip", most_skips=0), "more than most_skips = 0 of 64 steps"),
    ],
)
def test_a_guard_that_skips_already_is_not_advised_to_skip(guard, advice):
    judge = Judge(Settings(batch_size=8, guard=guard))
    with pytest.raises(StepStopped) as caught:
        judge.judge(7, {WHOLE: (math.nan, 4.0)}, [math.nan], {}, 1)
    assert advice in caught.value.fix
