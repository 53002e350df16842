"""What a step comes to is what a plain loop of torch comes to, and what ranks agree on is the same for all of them."""

import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(run_cases_together):
    return run_cases_together(
        "reference_cases.py",
        "against_torch:2",
        "against_torch_in_double:3",
        "doubles:1",
        "doubles:3",
        "doubles_in_place:2",
        "halved_doubles:2",
        "agreements:3",
        "death_at_the_end:3",
        "exactly:2",
        "fast:2",
        "fast_killed:3",
        "kept:2",
        "in_place:3",
        "own_updates:1",
        "in_place_own_updates:2",
        "kept_bad_steps:1",
        "in_place_bad_steps:2",
        "in_place_lost:3",
        "in_place_alone:1",
        "in_place_raises:2",
        "in_place_stopped:2",
        "in_place_resumed:1",
        "kept_as_long:1",
    )


def test_norms_and_weights_are_those_of_a_plain_loop_for_any_order_in_memory_and_with_statistics(
    results,
):
    found = results["against_torch:2"]
    assert found["code"] == 0, found["errors"]
    result = found["result"]
    assert result["strides"] == [1, 16]
    assert result["norms"] == pytest.approx(result["wanted"], rel=1e-5)
    assert result["difference"] < 1e-6
    assert "layout contract" not in found["errors"]


def test_parameters_in_double_have_gradients_sums_and_moments_in_double(results):
    found = results["against_torch_in_double:3"]["result"]
    assert found["norms"] == pytest.approx(found["wanted"], rel=1e-13)
    assert found["difference"] < 1e-14
    assert found["dtypes"] == ["torch.float32", "torch.float64", "torch.int64"]
    mixed, others, in_place = (
        results[case]["result"] for case in ("doubles:1", "doubles:3", "doubles_in_place:2")
    )
    assert mixed == others == in_place
    half = results["halved_doubles:2"]["result"]
    assert (half["dtypes"], half["masters"]) == (["torch.bfloat16"], ["torch.float64"])


def test_every_rank_has_the_same_state_and_gets_the_same_value_at_every_point_of_a_step_also_one_that_joins_in_the_middle(
    results,
):
    found = results["agreements:3"]
    assert found["code"] == 0, found["errors"]
    for step in range(8):
        paths = Path(found["result"]["directory"]).glob(f"seen-{step}-*.json")
        values = [json.loads(path.read_text()) for path in paths]
        assert len(values) >= 2
        assert all(value == values[0] for value in values)
        assert values[0]["count"] == step
        assert [each[1:] for each in values[0]["agreed"]] == [
            [step, point] for point in ("first", "edited", "updated", "committed")
        ]


def test_fast_mode_adds_a_ranks_lanes_in_one_slot_and_outlives_a_death(results):
    exact, fast, killed = (
        results[case]["result"] for case in ("exactly:2", "fast:2", "fast_killed:3")
    )
    assert (exact["slots"], fast["slots"]) == (2, 1)
    assert fast["losses"] == pytest.approx(exact["losses"], rel=1e-4)
    assert killed["losses"] == pytest.approx(exact["losses"], rel=1e-4)
    assert "was killed by signal 9" in results["fast_killed:3"]["errors"]


def test_state_that_is_updated_in_place_comes_to_the_bits_of_versions_that_rotate(results):
    kept, three = (results[case]["result"] for case in ("kept:2", "in_place:3"))
    assert kept["slots"] == 2
    assert not any(kept["in_place"])
    assert three["in_place"].count(True) == 4
    assert (kept["digest"], kept["found"]) == (three["digest"], three["found"])
    bad, kept_bad = (
        results[case]["result"] for case in ("in_place_bad_steps:2", "kept_bad_steps:1")
    )
    assert bad["digest"] == kept_bad["digest"] != kept["digest"]
    own = [results[case]["result"] for case in ("own_updates:1", "in_place_own_updates:2")]
    assert own[0] == own[1]


def test_without_recovery_a_rank_that_ends_ends_the_run_with_the_cause(results):
    lost, alone, raised = (
        results[case] for case in ("in_place_lost:3", "in_place_alone:1", "in_place_raises:2")
    )
    assert (lost["code"], alone["code"], raised["code"]) == (137, 64, 1)
    # What it had to do for step 2 was done: the others may have committed that one.
    cause = r"the run cannot succeed: rank 1 has ended during step [23], with recovery=False.*\(rank 1 was killed by signal 9"
    assert re.search(cause, lost["errors"].splitlines()[-1])
    assert "would join a run that began without it" in alone["errors"]
    assert raised["errors"].count("Traceback (most recent call last)") == 1
    assert "ValueError: label 11 is out of range)" in raised["errors"].splitlines()[-1]
    assert [lost["saves"], alone["saves"], raised["saves"]] == [[], [], []]


def test_without_recovery_a_stop_is_heeded_between_two_steps_and_saves_a_whole_state(results):
    assert results["in_place_stopped:2"]["code"] == 143, results["in_place_stopped:2"]["errors"]
    resumed, whole = (results[case] for case in ("in_place_resumed:1", "kept_as_long:1"))
    assert resumed["code"] == 0, resumed["errors"]
    assert resumed["result"]["digest"] == whole["result"]["digest"]
    # What the loop did after its last commit is saved, too.
    assert resumed["result"]["made"] == resumed["result"]["first"]


def test_a_replacement_that_comes_when_the_others_have_finished_ends_too(results):
    found = results["death_at_the_end:3"]
    assert found["code"] == 0, found["errors"]
    assert "rank 1 was killed by signal 9" in found["errors"]
    assert found["result"]["steps"] == 3
