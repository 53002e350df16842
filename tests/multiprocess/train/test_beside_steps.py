"""Evaluations, edits, averages, fed batches and rewinds: the same at every world size and through deaths."""

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]
CASES = (
    "evaluate:1",
    "evaluate:3",
    "evaluate_killed:3",
    "evaluate_wrongly:1",
    "evaluate_all:1",
    "evaluate_all:3",
    "frozen_statistics:1",
    "frozen_statistics:3",
    "evaluate_before_steps:1",
    "evaluate_before_steps_killed:3",
    "large_state_killed:2",
    "slow_batch:1",
    "slow_batch:3",
    "edit:1",
    "edit:3",
    "edit_killed:3",
    "edit_halves:2",
    "change_outside:2",
    "change_data_outside:1",
    "averages:1",
    "averages:3",
    "feed_killed:3",
    "feed_again:1",
    "feed_nothing:2",
    "rewind:1",
    "rewind:3",
    "rewind_killed:3",
    "without_the_batch:2",
    "rewind_spike:1",
    "rewind_spike:3",
    "rewind_without_snapshot:2",
    "rewind_pair:1",
    "rewind_pair:3",
    "rewind_pair_killed:3",
    "rewind_first_of_pair:2",
    "pair_without_the_batch:2",
    "feed_counted_killed:3",
    "feed_counted_again:1",
)


@pytest.fixture(scope="module")
def everything(run_cases_together):
    return run_cases_together("feature_cases.py", *CASES)


@pytest.fixture
def refusals(everything):
    def find(*wanted):
        assert [everything[each]["code"] for each in wanted] == [64] * len(wanted)
        return [everything[each]["errors"] for each in wanted]

    return find


def test_evaluations_are_the_same_at_every_world_size_and_when_a_rank_dies_in_one(results):
    one, three, killed, wrong = results(
        "evaluate:1", "evaluate:3", "evaluate_killed:3", "evaluate_wrongly:1"
    )
    assert one == three == killed
    assert one["found"][-2]["accuracy"] == one["by_hand"][0]
    assert one["found"][-2]["loss"] == pytest.approx(one["by_hand"][1], rel=1e-5)
    assert "not (sum, count)" in wrong["said"]


def test_an_evaluation_is_over_every_sample_once(results):
    one, three = results("evaluate_all:1", "evaluate_all:3")
    assert one == three
    for found, by_hand in zip(one["found"], one["by_hand"], strict=True):
        assert found["accuracy"] == by_hand["accuracy"]
        assert found["loss"] == pytest.approx(by_hand["loss"], rel=1e-5)


def test_a_part_in_evaluation_mode_stays_in_it(results):
    one, three = results("frozen_statistics:1", "frozen_statistics:3")
    assert one == three
    assert one["is_kept"]


def test_a_rank_that_joins_finds_the_evaluations_that_the_others_have_done(results):
    one, killed = results("evaluate_before_steps:1", "evaluate_before_steps_killed:3")
    assert one == killed


def test_a_rank_that_waits_for_its_data_is_not_hung(results):
    one, three = results("slow_batch:1", "slow_batch:3")
    assert (one["digest"], three["has_waited"]) == (three["digest"], True)


def test_state_from_before_the_loop_counts_and_is_as_large_as_is_said_beside_many_terms(results):
    (found,) = results("large_state_killed:2")
    assert found == {"size": 32_000, "steps": 3}


def test_edits_are_made_once_also_when_ranks_die_before_and_after_them(results):
    one, three, killed, halves = results("edit:1", "edit:3", "edit_killed:3", "edit_halves:2")
    assert one == three == killed
    assert (halves["is_halved"], halves["is_same_step"]) == (True, True)
    assert "outside a step" in halves["said"][0]
    assert "no weights 'ema'" in halves["said"][1]


def test_weights_that_are_changed_outside_a_step_are_refused(refusals):
    in_place, around = refusals("change_outside:2", "change_data_outside:1")
    assert "parameter '0.bias' was changed outside a step" in in_place
    assert "parameter '0.weight' was changed outside a step" in around


def test_averages_are_those_computed_by_hand_and_the_weights_come_back(results):
    one, three = results("averages:1", "averages:3")
    assert one == three
    assert (one["is_equal"], one["is_back"], one["differ"]) == (True, True, True)


def test_lanes_of_fed_batches_are_computed_again_from_the_same_bytes(results, refusals):
    """What is fed never repeats, so equal bits from its record mean that nothing was made twice."""
    killed, again = results("feed_killed:3", "feed_again:1")
    assert killed["digest"] == again["digest"]
    (said,) = refusals("feed_nothing:2")
    assert "there is no batch 0: this trainer has no data" in said


def test_a_rewind_comes_to_what_training_without_the_batch_comes_to(results):
    one, three, killed, without = results(
        "rewind:1", "rewind:3", "rewind_killed:3", "without_the_batch:2"
    )
    assert one == three == killed
    assert one["digest"] == without["digest"]
    assert one["omitted"] == [5]
    assert one["seen"] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    assert one["flags"][5] == [True, True]
    assert one["state"] == 9, "run.state goes back too"
    assert one["measured"] == list(range(9)), "so do the measurements"
    assert one["superseded"] == [3, 4, 5]


def test_a_spike_is_rewound_like_a_loss_that_is_not_finite(results):
    one, three = results("rewind_spike:1", "rewind_spike:3")
    assert one == three
    assert one["omitted"] == [20]
    assert one["seen"][20:23] == [20, 18, 19]


def test_a_rewind_undoes_all_updates_of_a_step_whichever_of_them_was_bad(results):
    one, three, killed, first, without = results(
        "rewind_pair:1",
        "rewind_pair:3",
        "rewind_pair_killed:3",
        "rewind_first_of_pair:2",
        "pair_without_the_batch:2",
    )
    assert one == three == killed == first
    assert (one["digest"], one["omitted"]) == (without["digest"], [5])
    assert one["seen"][4:8] == [[4, False], [5, True], [3, False], [4, False]]


def test_terms_of_fed_batches_have_their_own_totals_and_a_bad_batch_is_made_anew(results):
    killed, again = results("feed_counted_killed:3", "feed_counted_again:1")
    assert killed["digest"] == again["digest"]
    assert killed["seen"] == [[0, 0], [1, 0], [2, 0], [3, 1], [2, 0], [3, 0], [4, 0]]
    assert again["seen"] == [[step, 0] for step in range(5)]


def test_a_bad_step_without_a_snapshot_is_skipped_on_all_ranks(results):
    (found,) = results("rewind_without_snapshot:2")
    assert found["seen"] == list(range(24))
    assert found["flags"][20] == [True, False]
    assert found["omitted"] == []
