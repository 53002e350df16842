"""`layout="replicated"`: updates by user code have the same bits at every world size and through deaths."""

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]
CASES = (
    "sgd:1",
    "sgd:2",
    "sgd:3",
    "half:1",
    "half:3",
    "adam:2",
    "adam_shared:3",
    "by_hand:1",
    "by_hand:3",
    "sharpness_aware:1",
    "sharpness_aware:2",
    "sharpness_aware:3",
    "sharpness_aware_long:1",
    "sharpness_aware_killed:3",
    "quasi_newton:1",
    "quasi_newton:2",
    "quasi_newton:3",
    "quasi_newton_long:1",
    "quasi_newton_killed:3",
    "quasi_newton_saved:2",
    "quasi_newton_resumed:3",
    "logged_killed:2",
    "not_finite:1",
    "not_finite:2",
    "private_noise:2",
    "misused:1",
    "gradients_of_shared:1",
)


@pytest.fixture(scope="module")
def everything(run_cases_together):
    return run_cases_together("replicated_cases.py", *CASES)


def test_a_plain_update_has_the_same_bits_at_every_world_size_with_batch_statistics(results):
    one, two, three = results("sgd:1", "sgd:2", "sgd:3")
    assert one == two == three
    assert len({loss for loss, _, _ in one["losses"]}) == len(one["losses"])
    one, three = results("half:1", "half:3")
    assert one == three


def test_adamw_in_user_code_comes_to_the_bits_of_the_trainers_own_update(results):
    own, shared = results("adam:2", "adam_shared:3")
    assert own["values"] == shared["values"]
    assert own["losses"] == shared["losses"]


def test_an_update_by_hand_may_draw_random_numbers(results):
    one, three = results("by_hand:1", "by_hand:3")
    assert one == three


def test_two_gradients_in_a_step_have_the_same_bits_at_every_world_size(results):
    one, two, three = results("sharpness_aware:1", "sharpness_aware:2", "sharpness_aware:3")
    assert one == two == three
    assert all(first < second for first, second in one["losses"])


def test_a_closure_that_is_called_many_times_has_the_same_bits_at_every_world_size(results):
    one, two, three = results("quasi_newton:1", "quasi_newton:2", "quasi_newton:3")
    assert one == two == three
    assert max(map(len, one["losses"])) > 1


def test_a_death_between_two_gradients_changes_nothing_and_the_replacement_joins(results):
    one, killed = results("sharpness_aware_long:1", "sharpness_aware_killed:3")
    assert killed == {**one, "is_joined": True}
    one, killed = results("quasi_newton_long:1", "quasi_newton_killed:3")
    assert killed == {**one, "is_joined": True}


def test_every_step_is_logged_once_when_the_lowest_rank_is_replaced(results):
    (found,) = results("logged_killed:2")
    assert found["steps"] == list(range(10))


def test_a_resume_goes_on_with_the_lists_of_the_optimizer(results):
    half, rest, whole = results(
        "quasi_newton_saved:2", "quasi_newton_resumed:3", "quasi_newton_long:1"
    )
    assert half["losses"] + rest["losses"] == whole["losses"]
    assert rest["digest"] == whole["digest"]


def test_a_step_that_is_not_finite_leaves_parameters_without_gradients(results):
    one, two = results("not_finite:1", "not_finite:2")
    assert one == two
    assert one["flags"] == [[number == 2] * 2 for number in range(5)]
    assert one["digests"][1] == one["digests"][2] != one["digests"][3]


def test_what_only_one_process_knows_is_found_at_the_commit(everything):
    assert everything["private_noise:2"]["code"] != 0
    said = everything["private_noise:2"]["errors"]
    assert "the update of step 0 came to other values here than on another rank" in said


def test_what_belongs_to_the_other_layout_is_refused_with_a_way_out(results, everything):
    (found,) = results("misused:1")
    averages, schedule, precision, update, early, edit, late = found["said"]
    assert "ema = 0.9 with layout" in averages
    assert "schedule = " in schedule
    assert "give a model in the dtype you want" in precision
    assert "call step.gradients(), update the parameters yourself" in update
    assert "before its commit" in early
    assert "change the parameters themselves" in edit
    assert "is committed already" in late
    assert everything["gradients_of_shared:1"]["code"] == 64
    assert 'run.trainer(layout="replicated")' in everything["gradients_of_shared:1"]["errors"]
