"""The same bits of parameters and moments, of every loss and norm, at every world size and by every way of adding."""

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

WORLDS = ("gpt:1", "gpt:2", "gpt:3", "gpt:4", "gpt:8")


def test_a_gpt_comes_to_the_same_bits_at_every_world_size_with_and_without_native_kernels(
    run_cases,
):
    found = run_cases("world_cases.py", *WORLDS)
    assert {each: found[each]["code"] for each in WORLDS} == dict.fromkeys(WORLDS, 0), found
    first, *others = (found[each]["result"] for each in WORLDS)
    assert others == [first] * 4
    assert len(set(first["losses"])) == len(first["losses"]), "every step has changed the weights"

    (plain,) = run_cases(
        "world_cases.py", "gpt:2", variables={"ARGOSY_NATIVE": "0"}.items()
    ).values()
    assert plain["code"] == 0, plain["errors"]
    assert plain["result"].pop("kernels") == "torch operations"
    first.pop("kernels")
    assert plain["result"] == first
