"""Names of a store lead nowhere but into it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.checkpoint import names
from argosy.errors import CheckpointDamaged, ConfigError


@given(st.integers(0, names.LARGEST))
def test_a_step_has_one_name_and_the_name_one_step(step):
    assert names.step_of(names.step_name(step)) == step
    assert names.leftover_of(names.staging_name(step, "ab-1")) == ("staging", step, "ab-1")


@pytest.mark.parametrize(
    "name",
    [
        "step-1",
        "step-0000000001",
        "step-00000000x",
        ".step-000000001",
        "step-000000001.tmp",
        "step-9223372036854775808",
    ],
)
def test_other_names_are_no_checkpoints(name):
    assert names.step_of(name) is None


@pytest.mark.parametrize("step", [-1, True, 1.5, "3", 1 << 63])
def test_what_is_no_step_is_refused(step):
    with pytest.raises(ConfigError):
        names.step_name(step)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/etc/passwd", ".hidden", "a\0", "a\n", "x" * 129, 7, "ä"],
)
def test_a_name_that_may_lead_elsewhere_is_refused(name):
    with pytest.raises(CheckpointDamaged):
        names.check_file(name, "the manifest")
