"""The same bits at every world size for every kind of model, loss and optimizer."""

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]
CASES = (
    *(f"{case}:{ranks}" for case in ("plain", "kinds", "bfloat16") for ranks in (1, 2, 3)),
    "empty_lanes:1",
    "empty_lanes:3",
    "empty_lanes_by_hand:2",
    "named_terms:1",
    "named_terms:2",
    "named_terms:3",
    "named_terms_by_hand:1",
    "adversaries:1",
    "adversaries:3",
    "adversaries_killed:3",
    "every_optimizer:1",
    "every_optimizer:3",
)


@pytest.fixture(scope="module")
def everything(run_cases_together):
    return run_cases_together("model_cases.py", *CASES)


def test_kinds_of_models_come_to_the_same_bits_on_one_two_and_three_ranks(results):
    found = results(*CASES[:9])
    for place in range(0, 9, 3):
        one, two, three = found[place : place + 3]
        assert one == two == three
    assert len({result["digest"] for result in found}) == 3
    kinds = found[3]
    assert (kinds["is_kept"], kinds["is_tied"], kinds["has_statistics"]) == (True, True, True)
    assert kinds["num_batches"] == 4, "once per step, not once per lane"


def test_a_lane_may_have_nothing_to_learn_from(results):
    one, three, by_hand = results("empty_lanes:1", "empty_lanes:3", "empty_lanes_by_hand:2")
    assert one == three
    # A step without any gradient leaves everything as it is, one with zeros goes on by its momentum.
    assert one["losses"][:3] == by_hand["losses"][:3]
    assert one["losses"][2] == 0.0


def test_named_terms_are_divided_by_their_own_totals_before_backward(results):
    one, two, three = results("named_terms:1", "named_terms:2", "named_terms:3")
    assert one == two == three
    (by_hand,) = results("named_terms_by_hand:1")
    assert one["losses"][0] == pytest.approx(by_hand["loss"], rel=1e-5)
    assert one["norms"][0] == pytest.approx(by_hand["norm"], rel=1e-5)
    assert set(one["terms"]) == {"main", "side"}


def test_two_optimizers_make_one_commit_also_when_ranks_die_between_their_updates(results):
    one, three, killed = results("adversaries:1", "adversaries:3", "adversaries_killed:3")
    assert one == three == killed


def test_every_optimizer_of_torch_comes_to_the_same_bits_on_one_and_three_ranks(results):
    one, three = results("every_optimizer:1", "every_optimizer:3")
    assert one == three


@pytest.mark.slow
def test_a_compiled_model_comes_to_the_same_bits_on_one_and_two_ranks(run_cases, tmp_path):
    variables = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    found = run_cases("model_cases.py", "compiled:1", "compiled:2", variables=variables.items())
    assert found["compiled:1"]["code"] == 0, found["compiled:1"]["errors"]
    assert found["compiled:1"]["result"] == found["compiled:2"]["result"]
