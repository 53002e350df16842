"""Mixtures: exact shares in every block, each source in order without gaps, and O(1) seek through stages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.stages import BLOCK, Stages, apportion, read_schedule
from argosy.errors import ConfigError

WEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(any)


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS)
def test_quotas_fill_the_block_and_are_near_the_weights(weights):
    quotas = apportion(weights)
    assert sum(quotas) == BLOCK
    for quota, weight in zip(quotas, weights, strict=True):
        exact = weight / sum(weights) * BLOCK
        assert (quota == 0) == (weight == 0)
        assert quota == 1 or abs(quota - exact) <= len(weights)


@settings(max_examples=30, deadline=None)
@given(
    starts=st.lists(st.integers(1, 900), max_size=3, unique=True).map(sorted),
    batch_size=st.integers(1, 24),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_each_source_is_read_in_order_without_gaps_through_all_stages(
    starts, batch_size, seed, data
):
    starts = [0, *starts]
    quotas = [
        apportion(
            data.draw(st.lists(st.sampled_from([0, 1, 2.5, 7]), min_size=3, max_size=3).filter(any))
        )
        for _ in starts
    ]
    stages = Stages(starts, quotas, batch_size=batch_size, seed=seed)
    sources, ordinals = stages.assign(0, 1000 * batch_size)
    for source in range(3):
        mine = ordinals[sources == source]
        assert mine.tolist() == list(range(len(mine)))
    first, count = data.draw(st.integers(0, 900 * batch_size)), data.draw(st.integers(1, 99))
    again = stages.assign(first, min(count, 1000 * batch_size - first))
    np.testing.assert_array_equal(again[0], sources[first : first + len(again[0])])
    np.testing.assert_array_equal(again[1], ordinals[first : first + len(again[0])])


def test_shares_are_exact_in_every_block_of_a_stage():
    stages = Stages([0], [apportion([3, 1])], batch_size=1, seed=0)
    for block in (0, 1, 10**12):
        sources, _ = stages.assign(block * BLOCK, BLOCK)
        assert np.bincount(sources).tolist() == [BLOCK * 3 // 4, BLOCK // 4]


def test_a_stage_begins_with_its_batch():
    stages = Stages([0, 5], [apportion([1, 0]), apportion([0, 1])], batch_size=8, seed=0)
    sources, ordinals = stages.assign(0, 80)
    assert sources.tolist() == [0] * 40 + [1] * 40
    assert ordinals.tolist() == [*range(40), *range(40)]


def test_the_places_never_change():
    sources, ordinals = Stages([0], [apportion([2, 1])], batch_size=4, seed=5).assign(10**12, 8)
    assert sources.tolist() == [0, 0, 1, 0, 0, 0, 1, 1]
    assert ordinals[sources == 0].tolist() == list(range(666503906250, 666503906255))
    assert ordinals[sources == 1].tolist() == list(range(333496093750, 333496093753))


@pytest.mark.parametrize(
    ("weights", "text"),
    [({"a": -1}, "weights['a'] = -1"), ({"a": 0, "b": 0}, "all zero"), ({"c": 1}, "'c'"), ({}, "name no source"),
     ({"a": float("nan")}, "nan"), ({"a": float("inf")}, "inf"), ({"a": "much"}, "'much'"), ({5: {"a": 1}}, "begins at step 5"),
     ({0: {"a": 1}, -3: {"a": 1}}, "step -3"), ({0: {"z": 1}}, "weights[0] names 'z'"), ({0: {"a": 1}, 9: {"a": 0}}, "weights[9] are all zero"),
     ({"a": True}, "True"), (7, "7")],
)  # fmt: skip
def test_senseless_weights_are_refused_in_two_lines(weights, text):
    with pytest.raises(ConfigError) as caught:
        read_schedule(weights, ["a", "b"])
    assert text in caught.value.what
    assert caught.value.fix


def test_a_source_that_is_not_named_has_no_weight():
    assert read_schedule({10: {"b": 1}, 0: {"a": 2}}, ["a", "b"]) == {0: [2, 0], 10: [0, 1]}
