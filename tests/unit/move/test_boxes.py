import itertools
import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.errors import ConfigError
from argosy.move.boxes import (
    Box,
    Cut,
    Held,
    held_by,
    held_by_all,
    row_major,
    sharded,
)

extents = st.lists(st.integers(1, 6), min_size=0, max_size=3)


@st.composite
def box_in(draw, shape):
    begins = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - b)) for size, b in zip(shape, begins, strict=True)]
    return Box(tuple(begins), tuple(sizes))


def mask(shape, box):
    found = numpy.zeros(shape, dtype=int)
    found[tuple(slice(b, e) for b, e in zip(box.offsets, box.stops, strict=True))] = 1
    return found


@given(st.data())
def test_intersection_and_difference_are_those_of_the_element_sets(data):
    shape = tuple(data.draw(extents))
    first, second = data.draw(box_in(shape)), data.draw(box_in(shape))
    common = first.intersect(second)
    a, b = mask(shape, first), mask(shape, second)
    assert (mask(shape, common) if common else numpy.zeros(shape, int)).tolist() == (a * b).tolist()
    rest = first.subtract(second)
    total = sum((mask(shape, box) for box in rest), numpy.zeros(shape, int))
    assert total.tolist() == (a * (1 - b)).tolist()


def test_a_strided_cut_gives_one_box_per_interval():
    held = held_by((8, 3), (2, 2), (Cut(0, 2), Cut(0)), (0, 1))
    assert held == (Held(Box((4, 0), (2, 3)), 0, (3, 1)),)
    outer = held_by((8,), (2,), (Cut(0, 2),), (1,))
    assert outer == (Held(Box((2,), (2,)), 0, (1,)), Held(Box((6,), (2,)), 2, (1,)))


def test_uneven_chunks_follow_torch_chunk_and_the_last_may_hold_nothing():
    spec = sharded("w", (5,), "float32", mesh=(4,), cuts=(Cut(0),))
    assert [[h.box.sizes[0] for h in owner.held] for owner in spec.owners] == [[2], [2], [1], []]


@settings(max_examples=200)
@given(st.data())
def test_every_element_lies_where_cutting_an_array_would_put_it(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    cuts = [
        Cut(data.draw(st.sampled_from([None, *range(len(shape))])), data.draw(st.integers(1, 3)))
        for _ in mesh
    ]
    array = numpy.arange(math.prod(shape)).reshape(shape)
    everybody = held_by_all(shape, mesh, cuts)
    for place, coordinate in enumerate(itertools.product(*(range(n) for n in mesh))):
        assert held_by(shape, mesh, cuts, coordinate) == everybody[place]
        local = array
        for cut, chunks, index in zip(cuts, mesh, coordinate, strict=True):
            if cut.dim is not None:
                local = strided_chunk(local, cut.dim, cut.split_factor, chunks, index)
        memory = numpy.ascontiguousarray(local).reshape(-1)
        seen = 0
        for held in held_by(shape, mesh, cuts, coordinate):
            assert held.strides == row_major(local.shape)
            seen += held.box.volume
            last = held.at([stop - 1 for stop in held.box.stops])
            assert held.start <= last < memory.size
            view = numpy.lib.stride_tricks.as_strided(
                memory[held.start :], held.box.sizes, [8 * s for s in held.strides]
            )
            where = tuple(
                slice(b, e) for b, e in zip(held.box.offsets, held.box.stops, strict=True)
            )
            assert view.tolist() == array[where].tolist()
        assert seen == memory.size


def strided_chunk(array, dim, split_factor, chunks, index):
    pieces = [chunk(array, dim, split_factor, part) for part in range(split_factor)]
    return numpy.concatenate([chunk(piece, dim, chunks, index) for piece in pieces], axis=dim)


def chunk(array, dim, chunks, index):
    width = -(-array.shape[dim] // chunks)
    where = [slice(None)] * array.ndim
    where[dim] = slice(width * index, width * (index + 1))
    return array[tuple(where)]


def test_a_mesh_that_does_not_fit_its_placements_is_refused():
    with pytest.raises(ConfigError, match="do not fit a mesh"):
        held_by((4,), (2, 2), (Cut(0),), (0, 0))
    with pytest.raises(ConfigError, match="cuts dim 1"):
        held_by((4,), (2,), (Cut(1),), (0,))
    with pytest.raises(ConfigError, match="3 ranks were given"):
        sharded("w", (4,), "float32", mesh=(2,), ranks=(0, 1, 2), cuts=(Cut(0),))


def test_layouts_are_equal_for_tensors_that_differ_in_name_and_dtype_alone():
    first = sharded("a", (4, 4), "float32", mesh=(2,), cuts=(Cut(0),))
    same = sharded("b", (4, 4), "bfloat16", mesh=(2,), cuts=(Cut(0),))
    other = sharded("a", (4, 4), "float32", mesh=(2,), cuts=(Cut(1),))
    assert first.layout() == same.layout() != other.layout()
    assert first.digest() != same.digest()
