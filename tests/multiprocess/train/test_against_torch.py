"""What a step comes to is what a plain loop of torch comes to, and what ranks agree on is the same for all of them."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def results(run_cases_together):
    return run_cases_together(
        "reference_cases.py", "against_torch:2", "agreements:3", "death_at_the_end:3"
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


def test_a_replacement_that_comes_when_the_others_have_finished_ends_too(results):
    found = results["death_at_the_end:3"]
    assert found["code"] == 0, found["errors"]
    assert "rank 1 was killed by signal 9" in found["errors"]
    assert found["result"]["steps"] == 3
