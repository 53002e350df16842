"""The shuffle is a bijection, the same everywhere and for ever, and seeks in constant time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.order import MAX_SIZE, Permutation, derive_seed


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-5, 1 << 70), epoch=st.integers(0, 9))
def test_every_element_comes_once(size, seed, epoch):
    image = Permutation(size, seed, epoch)(np.arange(size))
    assert sorted(image.tolist()) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, MAX_SIZE), data=st.data())
def test_a_row_equals_its_elements_asked_one_by_one(size, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    shuffle = Permutation(size, 7, 0)
    row = shuffle(positions).tolist()
    assert row == [int(shuffle(position)) for position in positions]
    assert all(0 <= element < size for element in row)
    assert len(set(row)) == len(set(positions))


GOLDEN = {
    (10, 0, 0): [4, 8, 9, 0, 2],
    (1000, 1, 3): [36, 143, 539, 317, 770],
    (10**9, 0, 0): [544174533, 364138775, 30368778, 182501705, 341280911],
    (3 * 10**12, 42, 7): [
        1008102796264,
        2594415002023,
        2286257916732,
        1799338818993,
        1179062854993,
    ],
}


@pytest.mark.parametrize(("size", "seed", "epoch"), GOLDEN)
def test_the_bits_never_change(size, seed, epoch):
    positions = [0, 1, 2, size // 2, size - 1]
    assert Permutation(size, seed, epoch)(positions).tolist() == GOLDEN[size, seed, epoch]


def test_epochs_seeds_and_names_give_other_orders():
    orders = [
        tuple(Permutation(1000, *key)(np.arange(8)).tolist())
        for key in [(0, 0), (0, 1), (1, 0), ("a", 0, 0), ("b", 0, 0), (0, "0")]
    ]
    assert len(set(orders)) == len(orders)


def test_neighbours_are_scattered_evenly():
    size = 1 << 20
    image = Permutation(size, 3)(np.arange(1 << 14))
    counts = np.bincount(image * 64 // size, minlength=64)
    # 256 expected in each of 64 parts; eight standard deviations are never reached by a fair shuffle.
    assert abs(counts - 256).max() < 8 * 16
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05


def test_all_permutations_of_three_are_met_about_equally_often():
    met: dict[tuple[int, ...], int] = {}
    for seed in range(1200):
        order = tuple(Permutation(3, seed)(np.arange(3)).tolist())
        met[order] = met.get(order, 0) + 1
    assert len(met) == 6
    assert min(met.values()) > 120


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=str(size)):
        Permutation(size, 0)


def test_seeds_are_fixed_by_their_parts():
    assert derive_seed("sample", 0, 12, 3) == derive_seed("sample", 0, 12, 3)
    assert derive_seed("sample", 0, 1, 23) != derive_seed("sample", 0, 12, 3)
    assert 0 <= derive_seed("x") < 1 << 63
