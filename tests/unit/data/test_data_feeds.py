"""Feeds: batches as a pure function of (index, lane); everything once per epoch, whatever is asked first."""

import json
import pickle

import numpy as np
import pytest
import torch

from argosy.data.batches import Batch
from argosy.data.feeds import find_differences
from argosy.data.mixtures import Mixture
from argosy.data.tokens import Tokens
from argosy.errors import ConfigError, DataError


def token_file(path, count, first=0, dtype="uint16"):
    (np.arange(first, first + count) % 60000).astype(dtype).tofile(path)
    return path


@pytest.fixture
def tokens(tmp_path):
    return Tokens(token_file(tmp_path / "a.bin", 1601), "uint16", sequence_length=16)


def rows_of(feed, indices):
    return [
        row.tolist()
        for index in indices
        for lane in range(feed.lanes)
        for row in feed.batch(index, lane).tokens
    ]


def test_labels_are_the_next_tokens(tokens):
    batch = tokens.feed(batch_size=8, lanes=4, seed=0).batch(3, 2)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert batch.tokens.shape == batch.labels.shape == (2, 16)
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.tokens.is_contiguous()
    assert batch.labels.is_contiguous()
    assert (batch.rows, batch.index, batch.lane, batch.totals) == (2, 3, 2, None)


def test_every_row_comes_once_in_an_epoch_and_in_another_order_in_the_next(tokens):
    feed = tokens.feed(batch_size=10, lanes=5, seed=1)
    assert (feed.num_batches, len(feed)) == (10, 10)
    epochs = [rows_of(feed, range(10 * epoch, 10 * epoch + 10)) for epoch in range(3)]
    whole = [list(range(start, start + 16)) for start in range(0, 1600, 16)]
    for rows in epochs:
        assert sorted(rows) == whole
        assert rows != whole
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_epoch_may_end_inside_a_batch(tokens):
    feed = tokens.feed(batch_size=7, seed=1)
    rows = rows_of(feed, range(100))
    for epoch in range(7):
        part = rows[100 * epoch : 100 * epoch + 100]
        assert len({tuple(row) for row in part}) == 100


def test_what_a_pass_has_beyond_its_whole_batches_is_the_rest(tokens):
    feed = tokens.feed(batch_size=24, lanes=4, seed=1)  # of 100 rows
    rests = [feed.rest(lane) for lane in range(4)]
    assert [rest and (rest.rows, rest.index, rest.lane) for rest in rests] == [
        (4, 4, 0),
        None,
        None,
        None,
    ]
    rows = rows_of(feed, range(4)) + rests[0].tokens.tolist()
    assert len({tuple(row) for row in rows}) == 100
    assert all(tokens.feed(batch_size=10, lanes=5).rest(lane) is None for lane in range(5))
    uneven = tokens.feed(batch_size=30, lanes=5)
    assert [rest and rest.rows for rest in map(uneven.rest, range(5))] == [6, 4, None, None, None]


def test_a_batch_is_the_same_whoever_asks_first(tokens, tmp_path):
    feed = tokens.feed(batch_size=8, lanes=4, seed=3)
    other = Tokens(tmp_path / "a.bin", "uint16", sequence_length=16).feed(8, 4, 3)
    for index, lane in [(10**9, 3), (0, 0), (5, 1), (5, 0), (0, 3)]:
        assert torch.equal(feed.batch(index, lane).tokens, other.batch(index, lane).tokens)
    assert feed.fingerprint == other.fingerprint
    assert torch.equal(feed.batch(10**9, 3).tokens, feed.batch(10**9, 3).tokens)


def test_lanes_only_cut_the_batch(tokens):
    wide, narrow = tokens.feed(8, 2, seed=3), tokens.feed(8, 8, seed=3)
    assert rows_of(wide, range(3)) == rows_of(narrow, range(3))


def test_a_batch_larger_than_what_is_kept_has_the_same_order(tmp_path):
    tokens = Tokens(token_file(tmp_path / "b.bin", 9001), "uint16", sequence_length=2)
    large, small = tokens.feed(2000, 4, seed=3), tokens.feed(500, 1, seed=3)
    assert rows_of(large, range(1)) == rows_of(small, range(4))


def test_several_files_are_one_source(tmp_path):
    for number in range(3):
        token_file(tmp_path / f"part-{number}.bin", 33 + number, first=1000 * number)
    feed = Tokens(f"{tmp_path}/part-*.bin", "uint16", sequence_length=16).feed(batch_size=6)
    assert sorted(row[0] for row in rows_of(feed, [0])) == [0, 16, 1000, 1016, 2000, 2016]
    by_list = Tokens([tmp_path / f"part-{n}.bin" for n in range(3)], "uint16", sequence_length=16)
    assert by_list.feed(batch_size=6).fingerprint == feed.fingerprint
    assert Tokens(tmp_path, "uint16", sequence_length=16).feed(6).fingerprint == feed.fingerprint


@pytest.mark.parametrize("paths", ["nothing-*.bin", []])
def test_no_files_are_refused(paths):
    with pytest.raises(DataError):
        Tokens(paths)


def test_a_batch_not_divisible_by_lanes_is_refused(tokens):
    with pytest.raises(ConfigError) as caught:
        tokens.feed(batch_size=100, lanes=8)
    assert caught.value.what == "batch_size = 100 is not divisible by lanes = 8"
    assert caught.value.fix == "use 96 or 104"


@pytest.mark.parametrize(
    ("batch_size", "lanes", "seed"), [(0, 1, 0), (8, 0, 0), (8.0, 1, 0), (True, 1, 0), (8, 2, None), (2, 4, 0)]
)  # fmt: skip
def test_senseless_sizes_are_refused(tokens, batch_size, lanes, seed):
    with pytest.raises(ConfigError):
        tokens.feed(batch_size, lanes, seed)


def test_data_shorter_than_a_batch_is_refused(tokens):
    with pytest.raises(ConfigError) as caught:
        tokens.feed(batch_size=101)
    assert "100 samples, fewer than one batch of 101" in caught.value.what
    with pytest.raises(ConfigError, match="not one sample"):
        Mixture({"a": Tokens(tokens.files[0].path, "uint16")}, sequence_length=5000)


@pytest.mark.parametrize(("index", "lane"), [(-1, 0), (0, 2), (0, -1)])
def test_places_outside_are_refused(tokens, index, lane):
    with pytest.raises(ConfigError):
        tokens.feed(4, 2).batch(index, lane)


@pytest.mark.parametrize("length", [0, -4, 2.5, True, "256"])
def test_senseless_lengths_are_refused(tokens, length):
    with pytest.raises(ConfigError, match="sequence_length"):
        Tokens(tokens.files[0].path, "uint16", sequence_length=length)


def test_tokens_without_a_length_say_so(tokens):
    with pytest.raises(ConfigError, match="no sequence_length"):
        Tokens(tokens.files[0].path, "uint16").feed(4)
    with pytest.raises(ConfigError, match="packing"):
        Tokens(tokens.files[0].path, "uint16", sequence_length=4, packing="tight")


def test_a_file_changed_since_the_run_began_is_refused_at_the_next_batch(tokens):
    feed = tokens.feed(4)
    feed.batch(0, 0)
    token_file(tokens.files[0].path, 1601, first=5)
    with pytest.raises(DataError, match="changed since the run began"):
        feed.batch(1, 0)


def test_a_feed_is_described_in_little(tmp_path):
    for number in range(300):
        token_file(tmp_path / f"{'long-' * 20}{number:03}.bin", 100, first=number)
    feed = Tokens(tmp_path, "uint16", sequence_length=8).feed(4)
    assert len(json.dumps(feed.describe())) <= 4096
    sources = {
        f"{'ä' * 40}{n}": Tokens(path, "uint16")
        for n, path in enumerate(sorted(tmp_path.glob("*.bin")))
    }
    weights = {step: dict.fromkeys(sources, step + 1) for step in range(0, 500, 10)}
    mixture = Mixture(sources, weights=weights, sequence_length=8).feed(4)
    text = json.dumps(mixture.describe(), ensure_ascii=False).encode()
    assert len(text) <= 4096
    assert mixture.describe()["num_sources"] == 300
    assert mixture.describe()["fingerprint"] == mixture.fingerprint


def test_the_fingerprint_knows_all_that_decides_a_batch(tokens, tmp_path):
    path = tokens.files[0].path
    feeds = [
        tokens.feed(8, 2, 0), tokens.feed(8, 4, 0), tokens.feed(4, 2, 0), tokens.feed(8, 2, 1),
        Tokens(path, "uint16", sequence_length=8).feed(8, 2, 0),
        Mixture({"a": tokens}).feed(8, 2, 0),
        Mixture({"b": tokens}).feed(8, 2, 0),
        Mixture({"a": tokens, "b": tokens}, weights={"a": 1, "b": 2}).feed(8, 2, 0),
        Mixture({"a": tokens, "b": tokens}, weights={"a": 2, "b": 1}).feed(8, 2, 0),
    ]  # fmt: skip
    assert len({feed.fingerprint for feed in feeds}) == len(feeds)


def test_batches_are_ordinary_objects():
    batch = Batch({"tokens": torch.ones(2, 3), "names": ["a", "b"]}, index=4, lane=1)
    again = pickle.loads(pickle.dumps(batch))
    assert (again.index, again.lane, again.rows) == (4, 1, 2)
    assert torch.equal(again["tokens"], batch.tokens)
    assert list(batch) == ["tokens", "names"]
    assert "tokens" in batch
    assert repr(batch) == "Batch(index=4, lane=1, tokens=(2, 3), names)"
    with pytest.raises(AttributeError, match="no 'labels'; it has: tokens, names"):
        _ = batch.labels
    with pytest.raises(ConfigError, match="'rows'"):
        Batch({"rows": torch.ones(1)})


def told(before, after):
    return [(each.name, each.before, each.after) for each in find_differences(before, after)]


def test_what_differs_between_two_feeds_is_named_with_both_values(tokens, tmp_path):
    feed = tokens.feed(8, 2, 0).describe()
    assert told(feed, tokens.feed(8, 2, 0).describe()) == []
    assert told(feed, tokens.feed(16, 4, 1).describe()) == [
        ("batch_size", "8", "16"),
        ("lanes", "2", "4"),
        ("seed", "0", "1"),
    ]
    path = token_file(tmp_path / "other.bin", 900)
    length = tokens.sequence_length
    other = Tokens(path, "uint16", sequence_length=length).feed(8, 2, 0).describe()
    ((name, before, after),) = told(feed, other)
    assert name == "data"
    assert before.startswith(f"{tokens.files[0].path.name} of {tokens.num_tokens} tokens, ")
    assert (
        after == f"other.bin of 900 tokens, fingerprint {other['sources'][0]['fingerprint'][:12]}"
    )


def test_a_moved_file_differs_in_nothing(tokens, tmp_path):
    moved = tmp_path / "moved.bin"
    moved.write_bytes(tokens.files[0].path.read_bytes())
    there = Tokens(moved, "uint16", sequence_length=tokens.sequence_length)
    assert told(tokens.feed(8, 2, 0).describe(), there.feed(8, 2, 0).describe()) == []


def test_sources_of_a_mixture_are_named(tokens, tmp_path):
    other = Tokens(token_file(tmp_path / "other.bin", 900), "uint16")
    length = tokens.sequence_length
    one = Mixture({"a": tokens, "b": other}, weights={"a": 1, "b": 1}, sequence_length=length)
    two = Mixture({"a": tokens, "c": other}, weights={"a": 1, "c": 1}, sequence_length=length)
    found = told(one.feed(8, 2, 0).describe(), two.feed(8, 2, 0).describe())
    assert [name for name, *_ in found] == ["source 'b'", "source 'c'"]
    assert [found[0][2], found[1][1]] == ["none", "none"]


def test_of_descriptions_that_say_nothing_nothing_can_be_told(tokens):
    assert told({}, tokens.feed(8, 2, 0).describe()) == []
