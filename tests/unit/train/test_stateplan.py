"""Places of a version's fields: inside, in order, not overlapping, large ones at memory pages."""

from hypothesis import given
from hypothesis import strategies as st

from argosy.train.stateplan import LEDGER_BYTES, Field, StatePlan

_SHAPES = st.lists(st.integers(0, 300), max_size=3).map(tuple)


def _plan(shapes):
    names = tuple(f"p{place}" for place in range(len(shapes)))
    fields = tuple(
        Field(name=name, key=key, shape=shape, dtype="float32", item_bytes=4)
        for name, shape in zip(names, shapes, strict=True)
        for key in ("value", "exp_avg")
    )
    return StatePlan(names=names, fields=fields)


@given(st.lists(_SHAPES, min_size=1, max_size=12))
def test_fields_do_not_overlap(shapes):
    plan = _plan(shapes)
    end = LEDGER_BYTES + 8 * len(plan.names)
    for field, offset in zip(plan.fields, plan.offsets, strict=True):
        assert offset >= end
        assert offset % 64 == 0
        if field.num_bytes >= 4096:
            assert offset % 4096 == 0
        end = offset + field.num_bytes
    assert end <= plan.num_bytes


def test_equal_plans_have_equal_digests_only():
    assert _plan([(2, 3)]).digest == _plan([(2, 3)]).digest
    assert _plan([(2, 3)]).digest != _plan([(3, 2)]).digest
