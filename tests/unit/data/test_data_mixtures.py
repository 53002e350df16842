"""Mixtures: each source once per epoch, at its share, in stages, the same at every seek."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.datasets import as_source
from argosy.data.mixtures import Mixture
from argosy.data.tokenizers import ByteTokenizer
from argosy.data.tokens import Tokens
from argosy.data.tokenwriter import TokenWriter
from argosy.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Row n of source a begins with 1000 + n, of b with 20000 + n, of c with 40000 + n."""
    folder = tmp_path_factory.mktemp("sources")
    for name, first, rows in (("a", 1000, 40), ("b", 20000, 100), ("c", 40000, 7)):
        tokens = np.zeros(rows * 4 + 1, "<u2") + np.uint16(first)
        tokens[:-1] += np.arange(rows * 4).astype("<u2") // 4
        tokens.tofile(folder / f"{name}.bin")
    return {name: Tokens(folder / f"{name}.bin", "uint16") for name in "abc"}


def firsts(feed, count):
    return [
        int(row[0])
        for index in range(count)
        for lane in range(feed.lanes)
        for row in feed.batch(index, lane).tokens
    ]


@settings(max_examples=25, deadline=None)
@given(
    weights=st.tuples(*[st.sampled_from([0, 1, 3, 0.2])] * 3).filter(any),
    later=st.tuples(*[st.sampled_from([0, 1, 3])] * 3).filter(any),
    change=st.integers(1, 50),
    lanes=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 3),
)
def test_each_source_gives_everything_once_before_anything_twice(
    sources, weights, later, change, lanes, seed
):
    by_step = {
        0: dict(zip("abc", weights, strict=True)),
        change: dict(zip("abc", later, strict=True)),
    }
    feed = Mixture(sources, weights=by_step, sequence_length=4).feed(8, lanes, seed)
    seen = firsts(feed, 60)
    for low, rows in ((1000, 40), (20000, 100), (40000, 7)):
        mine = [number for number in seen if low <= number < low + rows]
        for start in range(0, len(mine), rows):
            epoch = mine[start : start + rows]
            assert len(set(epoch)) == len(epoch)
    assert sum(low <= number < low + 100 for number in seen for low in (1000, 20000, 40000)) == 480


def test_shares_follow_the_weights_by_stage(sources):
    mixture = Mixture(sources, weights={0: {"a": 1}, 10: {"b": 3, "c": 1}}, sequence_length=4)
    seen = firsts(mixture.feed(32, 4), 266)
    assert all(number < 20000 for number in seen[:320])
    late = seen[320 : 320 + 2 * 2048]
    assert sum(20000 <= number < 40000 for number in late) == 2 * 2048 * 3 // 4
    assert not any(number < 20000 for number in seen[320:])


def test_without_weights_sources_count_by_their_size(sources):
    seen = firsts(Mixture(sources, sequence_length=4).feed(64), 32)
    assert abs(sum(number < 20000 for number in seen) - 2048 * 40 / 147) < 2


def test_seeking_far_gives_the_same_batch_as_another_process_would(sources):
    weights = {0: {"a": 1, "b": 1}, 1000: {"b": 1, "c": 2}, 10**8: {"a": 1, "c": 1}}
    first, second = (
        Mixture(sources, weights=weights, sequence_length=4).feed(8, 2, 9) for _ in "ab"
    )
    for index in (0, 999, 1000, 10**8 - 1, 10**8, 10**12):
        assert torch.equal(first.batch(index, 1).tokens, second.batch(index, 1).tokens)
    assert first.num_batches is None
    with pytest.raises(TypeError):
        len(first)
    assert first


def test_the_order_of_a_mixture_never_changes(sources):
    feed = Mixture(sources, weights={"a": 2, "b": 1, "c": 1}, sequence_length=4).feed(8, 2, 0)
    assert firsts(feed, 1) == [20027, 1023, 1005, 20000, 40005, 40003, 1003, 1028]


def test_one_source_in_a_mixture_is_read_like_any(sources):
    feed = Mixture({"a": sources["a"]}, sequence_length=4).feed(8)
    assert sorted(firsts(feed, 5)) == list(range(1000, 1040))


@pytest.mark.parametrize("given_sources", [{}, [], None])
def test_a_mixture_of_nothing_is_refused(given_sources):
    with pytest.raises(ConfigError):
        Mixture(given_sources, sequence_length=4)


def test_senseless_mixtures_are_refused(sources):
    with pytest.raises(ConfigError, match="no source of this mixture"):
        Mixture(sources, weights={"d": 1}, sequence_length=4)
    with pytest.raises(ConfigError, match="no sequence_length"):
        Mixture(sources)
    with pytest.raises(ConfigError, match="is a mixture"):
        Mixture({"m": Mixture(sources, sequence_length=4)}, sequence_length=4)
    with pytest.raises(ConfigError, match="token files and other"):
        Mixture({"a": sources["a"], "d": [1, 2, 3]}, sequence_length=4)
    with pytest.raises(ConfigError, match="sequence_length 8, the mixture 4"):
        Mixture(
            {"a": Tokens(sources["a"].files[0].path, "uint16", sequence_length=8)},
            sequence_length=4,
        )
    with pytest.raises(ConfigError, match="147 samples, fewer than one batch of 200"):
        Mixture(sources, sequence_length=4).feed(200)
    with pytest.raises(ConfigError, match="is no data set"):
        Mixture({"a": 7}, sequence_length=4)


def test_files_of_different_tokenizers_are_not_mixed(tmp_path):
    class Another(ByteTokenizer):
        name = "another"

    for name, tokenizer in (("x", ByteTokenizer()), ("y", Another())):
        with TokenWriter(tmp_path / f"{name}.bin", tokenizer) as writer:
            writer.append_documents([b"some text"])
            writer.close()
    with pytest.raises(DataError, match=r"packed with bytes, y\.bin with another"):
        Tokens([tmp_path / "x.bin", tmp_path / "y.bin"])
    both = {"x": Tokens(tmp_path / "x.bin"), "y": Tokens(tmp_path / "y.bin")}
    with pytest.raises(DataError, match="x and y were packed with different tokenizers"):
        Mixture(both, sequence_length=4)
    assert Mixture({"x": both["x"]}, sequence_length=4).vocabulary_size == 257


def test_data_sets_can_be_mixed(sources):
    mixture = Mixture({"low": as_source(list(range(10))), "high": list(range(100, 110))})
    values = mixture.feed(4).batch(0, 0).inputs
    assert values.shape == (4,)
