"""What is said of a step whose verdict is final."""

import pytest

from argosy.train.judgement import NOTHING, Judge


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
