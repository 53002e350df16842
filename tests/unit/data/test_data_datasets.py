"""Any map-style data set is a source: dicts, pairs and tensors, with random augmentation that repeats exactly."""

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from argosy.data.datasets import as_source, generators_seeded
from argosy.data.tokens import Tokens
from argosy.errors import ConfigError


class Noisy(Dataset):
    """Draws from all three generators."""

    def __init__(self, size=20):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        noise = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return {"number": number, "noise": torch.tensor(noise, dtype=torch.float64)}


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


def test_a_tensor_dataset_gives_inputs_and_labels():
    source = as_source(TensorDataset(torch.arange(10.0), torch.arange(10)))
    batch = source.feed(batch_size=4, lanes=2).batch(0, 1)
    assert batch.rows == 2
    assert torch.equal(batch.inputs.long(), batch.labels)


def test_every_sample_comes_once_in_an_epoch():
    feed = as_source(Noisy(20)).feed(batch_size=5, lanes=5, seed=2)
    numbers = [int(feed.batch(i, lane).number) for i in range(4) for lane in range(5)]
    assert sorted(numbers) == list(range(20))


def test_augmentation_repeats_for_a_place_and_differs_between_epochs():
    feed = as_source(Noisy(8)).feed(batch_size=8, seed=2)
    torch.manual_seed(1)
    first = feed.batch(0, 0)
    torch.manual_seed(2)
    random.seed(5)
    np.random.seed(7)
    assert torch.equal(first.noise, feed.batch(0, 0).noise)
    later = feed.batch(1, 0)
    by_number = dict(zip(later.number.tolist(), later.noise.tolist(), strict=True))
    for number, noise in zip(first.number.tolist(), first.noise.tolist(), strict=True):
        assert by_number[number] != noise
    other = as_source(Noisy(8)).feed(batch_size=8, seed=3).batch(0, 0)
    assert set(map(tuple, other.noise.tolist())).isdisjoint(map(tuple, first.noise.tolist()))


def test_making_a_batch_leaves_the_generators_as_they_were():
    def draw():
        return torch.rand(2).tolist(), np.random.rand(), random.random()

    feed = as_source(Noisy()).feed(4)
    with generators_seeded(3):
        expected = draw()
    with generators_seeded(3):
        feed.batch(0, 0)
        assert draw() == expected


def test_tensors_named_tuples_and_named_values():
    assert as_source([torch.ones(3)] * 4).feed(2).batch(0, 0).inputs.shape == (2, 3)
    pairs = as_source([Pair(torch.ones(3), 1)] * 4).feed(2).batch(0, 0)
    assert (pairs.image.shape, pairs.label.tolist()) == ((2, 3), [1, 1])
    triples = [(1, 2, 3)] * 4
    assert as_source(triples, names=("a", "b", "c")).feed(2).batch(0, 0).c.tolist() == [3, 3]
    with pytest.raises(ConfigError, match="3 values per sample, and 2 names"):
        as_source(triples).feed(2).batch(0, 0)


def test_a_collate_function_of_ones_own():
    def join(samples):
        return {"text": "+".join(samples), "length": torch.tensor([len(s) for s in samples])}

    batch = as_source(["a", "bb", "ccc"], join).feed(3).batch(0, 0)
    assert sorted(batch.text.split("+")) == ["a", "bb", "ccc"]
    assert batch.rows == 3


def test_the_fingerprint_sees_other_samples_and_other_sizes():
    rows = torch.arange(20.0)
    changed = rows.clone()
    changed[-1] = 7
    prints = {as_source(TensorDataset(part)).fingerprint for part in (rows, changed, rows[:-1])}
    assert len(prints) == 3
    assert (
        as_source(TensorDataset(rows)).fingerprint
        == as_source(TensorDataset(rows.clone())).fingerprint
    )
    assert as_source(Noisy()).fingerprint == as_source(Noisy()).fingerprint


def test_a_fingerprint_of_its_own_is_taken():
    class Known(Noisy):
        _fingerprint = "abc"

    class Other(Noisy):
        _fingerprint = "abd"

    Other.__qualname__ = Known.__qualname__
    assert as_source(Known()).fingerprint != as_source(Other()).fingerprint


def test_what_cannot_be_read_again_is_refused(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    for wrong, text in (
        (Stream(), "can only be iterated"),
        (7, "is no data set"),
        (iter([]), "is no data set"),
        ("code.bin", "str is no data set"),
        ({"a": 1}, "dict is no data set"),
    ):
        with pytest.raises(ConfigError, match=text):
            as_source(wrong)
    with pytest.raises(ConfigError, match="3 samples, fewer than one batch of 4"):
        as_source([1, 2, 3]).feed(4)
    with pytest.raises(ConfigError, match="0 samples"):
        as_source([]).feed(1)


def test_sources_are_returned_as_they_are(tmp_path):
    np.arange(9, dtype="<u2").tofile(tmp_path / "x.bin")
    tokens = Tokens(tmp_path / "x.bin", "uint16")
    assert as_source(tokens) is tokens
