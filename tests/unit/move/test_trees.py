"""The canonical tree: whatever covers the lanes, the sum has the bits of the tree over single lanes."""

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.errors import ConfigError
from argosy.move import trees
from argosy.move.trees import ADD, Node


def add32(a, b):
    return np.float32(a) + np.float32(b)


def whole_tree(values, first, count):
    """The definition, written down once more: recursive, over single lanes."""
    if count == 1:
        return values[first]
    left = 1
    while left * 2 < count:
        left *= 2
    return add32(whole_tree(values, first, left), whole_tree(values, first + left, count - left))


def bits(value):
    return struct.pack("<f", value)


def random_values(seed, count):
    generator = np.random.default_rng(seed)
    exponents = generator.integers(-12, 12, count)
    return [np.float32(x) for x in generator.standard_normal(count) * 2.0**exponents]


def split_lanes(num_lanes, cuts):
    edges = [0, *sorted({cut % (num_lanes + 1) for cut in cuts}), num_lanes]
    return [(a, b - a) for a, b in itertools.pairwise(edges) if b > a]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 1000), max_size=12),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_any_partition_gives_the_bits_of_the_whole_tree(num_lanes, cuts, seed, folded):
    values = random_values(seed, num_lanes)
    sums = {}
    for first, count in split_lanes(num_lanes, cuts):
        for node in trees.blocks_of(first, count, num_lanes):
            sums[node] = whole_tree(values, *node)
            while folded and (parent := trees.parent_of(node, num_lanes)) != node:
                left, right = trees.halves(parent)
                if left not in sums or right not in sums:
                    break
                sums[parent] = add32(sums.pop(left), sums.pop(right))
                node = parent
    blocks = trees.cover(sums, num_lanes)
    program = trees.program(blocks, num_lanes)
    result = trees.evaluate(program, [sums[node] for node in blocks], add32)
    assert bits(result) == bits(whole_tree(values, 0, num_lanes))


def test_every_world_size_gives_the_same_bits_and_no_order_but_the_tree_does():
    for num_lanes in range(1, 41):
        values = random_values(num_lanes, num_lanes)
        expected = bits(whole_tree(values, 0, num_lanes))
        for world_size in range(1, num_lanes + 1):
            edges = [num_lanes * rank // world_size for rank in range(world_size + 1)]
            blocks = [
                node
                for a, b in itertools.pairwise(edges)
                for node in trees.blocks_of(a, b - a, num_lanes)
            ]
            sums = [whole_tree(values, *node) for node in blocks]
            total = trees.evaluate(trees.program(blocks, num_lanes), sums, add32)
            assert bits(total) == expected
    values = random_values(3, 37)
    in_lane_order = values[0]
    for value in values[1:]:
        in_lane_order = add32(in_lane_order, value)
    assert bits(in_lane_order) != bits(whole_tree(values, 0, 37))


@given(st.integers(1, 40), st.data())
def test_nodes_of_are_nodes_few_and_cover_exactly(num_lanes, data):
    first = data.draw(st.integers(0, num_lanes - 1))
    count = data.draw(st.integers(0, num_lanes - first))
    nodes = trees.nodes_of(first, count, num_lanes)
    lanes = [lane for node in nodes for lane in range(node.first, node.stop)]
    assert lanes == list(range(first, first + count))
    assert all(
        trees.parent_of(node, num_lanes) == node or not inside(node, first, count, num_lanes)
        for node in nodes
    )


def inside(node, first, count, num_lanes):
    parent = trees.parent_of(node, num_lanes)
    return first <= parent.first and parent.stop <= first + count


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40)), max_size=20))
def test_a_cover_is_disjoint_and_loses_no_lane(num_lanes, ranges):
    blocks = [
        node
        for first, count in ranges
        if first + count <= num_lanes
        for node in trees.nodes_of(first, count, num_lanes)
    ]
    chosen = trees.cover(blocks, num_lanes)
    lanes = [lane for node in chosen for lane in range(node.first, node.stop)]
    assert len(lanes) == len(set(lanes))
    assert trees.missing(chosen, num_lanes) == trees.missing(blocks, num_lanes)


def test_pairs_of_siblings_share_a_block():
    assert trees.blocks_of(0, 5, 8) == [Node(0, 2), Node(2, 2), Node(4, 1)]
    assert trees.blocks_of(3, 5, 8) == [Node(3, 1), Node(4, 2), Node(6, 2)]
    assert trees.program([Node(0, 2), Node(2, 1)], 3) == [0, 1, ADD]


def test_programs_stay_within_the_depth_of_the_kernel():
    for num_lanes in (1, 2, 37, 512, 4095):
        single = [Node(lane, 1) for lane in range(num_lanes)]
        assert trees.depth(trees.program(single, num_lanes)) <= 64


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        [Node(0, 4)],
        [Node(0, 4), Node(0, 4)],
        [Node(0, 4), Node(2, 4)],
        [Node(0, 3), Node(3, 5)],
    ],
)
def test_what_is_no_cover_is_refused(blocks):
    with pytest.raises(ConfigError):
        trees.program(blocks, 8)


def test_lanes_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="lanes 6 to 9 of 8"):
        trees.nodes_of(6, 4, 8)
    with pytest.raises(ConfigError, match="no node"):
        trees.parent_of(Node(1, 2), 8)
