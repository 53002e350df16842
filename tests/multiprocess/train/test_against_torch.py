"""What a step comes to is what a plain loop of torch comes to."""

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]


def test_norms_and_weights_are_those_of_a_plain_loop_for_any_order_in_memory_and_with_statistics(
    run_cases,
):
    found = run_cases("reference_cases.py", "against_torch:2")["against_torch:2"]
    assert found["code"] == 0, found["errors"]
    result = found["result"]
    assert result["strides"] == [1, 16]
    assert result["norms"] == pytest.approx(result["wanted"], rel=1e-5)
    assert result["difference"] < 1e-6
    assert "layout contract" not in found["errors"]
