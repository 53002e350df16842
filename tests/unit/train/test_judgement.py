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


def uncounted(guard, ledger=None, terms=None):
    terms = terms or {WHOLE: (3.5, 0.0), "loss": (3.5, 0.0)}
    judge = Judge(Settings(batch_size=8, guard=guard))
    return judge.judge(7, terms, [4.0], ledger or {}, 0)


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_loss_that_counts_nothing_on_any_lane_is_left_out_and_not_trained_undivided(policy):
    outcome = uncounted(Guard(policy=policy))
    assert outcome["verdict"] == "skip"
    assert math.isnan(outcome["loss"])
    assert Judge.remark(7, outcome, 0, 2) == (
        "step 7: the loss counts 0 on every lane, its sum is 3.5: it is left out"
    )


@pytest.mark.parametrize(
    ("guard", "ledger"),
    [(Guard(policy="stop"), {}), (Guard(most_skips=2), {"skipped": [5, 6]})],
)
def test_a_loss_that_never_counts_anything_stops_the_run_with_the_cause(guard, ledger):
    with pytest.raises(StepStopped, match="step 7: the loss counts 0 on every lane") as caught:
        uncounted(guard, ledger)
    assert "(sum, count)" in caught.value.fix


def test_a_named_term_that_is_summed_over_nothing_is_named():
    terms = {WHOLE: (5.0, 0.0), "main": (4.0, 8.0), "side": (1.0, 0.0)}
    outcome = uncounted(Guard(), terms=terms)
    assert outcome["verdict"] == "skip"
    assert "term 'side' of the loss counts 0 on every lane, its sum is 1" in outcome["uncounted"]


@pytest.mark.parametrize(
    ("terms", "votes"),
    [
        ({WHOLE: (0.0, 0.0), "loss": (0.0, 0.0)}, [0.0]),
        ({WHOLE: (4.0, 0.0), "main": (4.0, 8.0), "side": (0.0, 0.0)}, [4.0]),
        ({WHOLE: (4.0, 2.0), "loss": (4.0, 2.0)}, [4.0]),
    ],
    ids=["nothing to learn from", "a term that no lane has", "counted"],
)
def test_what_counts_nothing_and_is_nothing_is_no_fault(terms, votes):
    judge = Judge(Settings(batch_size=8))
    outcome = judge.judge(7, terms, votes, {}, 0)
    assert outcome["verdict"] == "go"
    assert Judge.remark(7, outcome, 0, 2) == ""
