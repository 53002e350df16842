"""Boxes and byte runs agree with what numpy says of the same tensor."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import ranges
from argosy.move.boxes import Box

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxes(draw):
    shape = draw(SHAPES)
    offsets, sizes = [], []
    for size in shape:
        low = draw(st.integers(0, size - 1))
        offsets.append(low)
        sizes.append(draw(st.integers(1, size - low)))
    return shape, Box(tuple(offsets), tuple(sizes))


def elements(shape, box):
    flat = np.arange(math.prod(shape)).reshape(shape)
    return flat[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))].reshape(-1)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.data())
def test_a_stretch_is_boxes_in_order_each_element_once(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    found = ranges.boxes_of_range(shape, start, stop)
    passed = [int(i) for box in found for i in elements(shape, box)]
    assert passed == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=40, deadline=None)
@given(boxes())
def test_runs_of_a_box_are_its_elements_in_order_and_as_long_as_can_be(case):
    shape, box = case
    starts, length = ranges.runs_of_box(shape, box)
    found = [int(s) + i for s in starts for i in range(length)]
    assert found == elements(shape, box).tolist()
    if len(shape) == len([s for s in shape if s > 1]):  # dims of one element may split a run
        assert all(b - a > length for a, b in pairwise(starts)) or len(starts) == 1


@settings(max_examples=40, deadline=None)
@given(boxes(), st.integers(0, 50), st.sampled_from([1, 2, 4, 8, 16]))
def test_chunks_of_a_box_are_those_that_hold_its_bytes(case, offset, chunk):
    shape, box = case
    starts, length = ranges.runs_of_box(shape, box)
    found = ranges.chunks_of_runs(offset + starts, length, chunk)
    assert found.tolist() == sorted({(offset + int(i)) // chunk for i in elements(shape, box)})


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 60)), st.integers(1, 8), st.integers(1, 4))
def test_stretches_are_the_chunks_and_no_longer_than_allowed(chunks, chunk, most):
    size = (max(chunks, default=0) + 1) * chunk - chunk // 2
    found = ranges.stretches(np.array(sorted(chunks), np.int64), chunk, size, most * chunk)
    covered = {byte // chunk for start, stop in found for byte in range(start, stop)}
    assert covered == chunks
    assert all(start % chunk == 0 and 0 < stop - start <= most * chunk for start, stop in found)
    assert all(a[1] <= b[0] for a, b in pairwise(found))


def test_a_quarter_of_the_rows_reads_a_quarter_of_the_chunks():
    starts, length = ranges.runs_of_box((4096, 1024), Box((1024, 0), (1024, 1024)))
    chunks = ranges.chunks_of_runs(4096 + starts * 4, length * 4, 65536)
    assert len(chunks) * 65536 <= 1.1 * 1024 * 1024 * 4
