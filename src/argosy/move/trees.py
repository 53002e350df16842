"""The canonical binary tree over the lanes of a step: the one order in which gradients and losses are added.

A node of n lanes splits at the largest power of two below n. Equal trees give equal bits, so whatever set of nodes covers the lanes,
`program` adds them up as if every lane stood alone. Called by the exchange and by whoever plans lanes. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from argosy.errors import ConfigError

T = TypeVar("T")

ADD = -1
"""In a postfix program: add the two topmost values."""


class Node(NamedTuple):
    """A contiguous range of lanes that the canonical tree has as a node."""

    first: int
    size: int

    @property
    def stop(self) -> int:
        """The lane after the last one."""
        return self.first + self.size


def halves(node: Node) -> tuple[Node, Node]:
    """The two children of a node of at least two lanes."""
    if node.size < 2:
        raise ConfigError(f"lane {node.first} alone has no children", fix="split larger nodes")
    left = 1 << ((node.size - 1).bit_length() - 1)
    return Node(node.first, left), Node(node.first + left, node.size - left)


@functools.lru_cache(maxsize=4096)
def parent_of(node: Node, num_lanes: int) -> Node:
    """The node whose child this one is; the root is its own parent."""
    parent = current = Node(0, num_lanes)
    while current != node:
        if current.size < 2 or not (current.first <= node.first and node.stop <= current.stop):
            raise ConfigError(
                f"lanes {node.first} to {node.stop - 1} are no node of the tree over {num_lanes} lanes",
                fix="take ranges from nodes_of()",
            )
        parent = current
        left, right = halves(current)
        current = left if node.first < right.first else right
    return parent


def nodes_of(first: int, count: int, num_lanes: int) -> list[Node]:
    """The fewest nodes that make up the lanes [first, first + count), in lane order."""
    if first < 0 or count < 0 or first + count > num_lanes:
        raise ConfigError(
            f"lanes {first} to {first + count - 1} of {num_lanes}", fix="stay inside the lanes"
        )
    found: list[Node] = []
    waiting = [Node(0, num_lanes)]
    while waiting:
        node = waiting.pop()
        if node.first >= first + count or node.stop <= first:
            continue
        if first <= node.first and node.stop <= first + count:
            found.append(node)
        else:
            left, right = halves(node)
            waiting += [right, left]
    return found


def blocks_of(first: int, count: int, num_lanes: int) -> list[Node]:
    """What a rank with these lanes computes, in order: pairs of siblings in one slot, and lanes that stand alone."""
    found: list[Node] = []
    waiting = nodes_of(first, count, num_lanes)[::-1]
    while waiting:
        node = waiting.pop()
        if node.size <= 2:
            found.append(node)
        else:
            left, right = halves(node)
            waiting += [right, left]
    return found


def cover(blocks: Iterable[Node], num_lanes: int) -> list[Node]:
    """The largest of the given nodes, disjoint and in lane order; they cover whatever the given ones cover together."""
    largest: dict[int, Node] = {}
    for node in blocks:
        if node.first not in largest or largest[node.first].size < node.size:
            largest[node.first] = node
    found: list[Node] = []
    lane = 0
    while lane < num_lanes:
        if lane in largest:
            found.append(largest[lane])
            lane = largest[lane].stop
        else:
            lane += 1
    return found


def missing(blocks: Iterable[Node], num_lanes: int) -> list[int]:
    """The lanes that no block has."""
    there = {lane for node in blocks for lane in range(node.first, node.stop)}
    return [lane for lane in range(num_lanes) if lane not in there]


def program(blocks: Sequence[Node], num_lanes: int) -> list[int]:
    """The postfix program that adds disjoint blocks, which cover all lanes, in the order of the tree.

    A value i >= 0 pushes `blocks[i]`, ADD adds the two topmost.
    """
    index = {node: position for position, node in enumerate(blocks)}
    if sum(node.size for node in blocks) != num_lanes or len(index) != len(blocks):
        raise ConfigError(
            f"{len(blocks)} blocks do not cover {num_lanes} lanes exactly once",
            fix="take them from cover(), with no lane missing",
        )
    steps: list[int] = []
    waiting: list[Node | None] = [Node(0, num_lanes)]
    while waiting:
        node = waiting.pop()
        if node is None:
            steps.append(ADD)
        elif node in index:
            steps.append(index[node])
        elif node.size == 1:
            raise ConfigError(
                f"lane {node.first} is in no block that is a node of the tree",
                fix="take ranges from nodes_of()",
            )
        else:
            left, right = halves(node)
            waiting += [None, right, left]
    return steps


def evaluate(steps: Sequence[int], values: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Carry out a postfix program on values of any kind."""
    stack: list[T] = []
    for step in steps:
        if step == ADD:
            right = stack.pop()
            stack.append(add(stack.pop(), right))
        else:
            stack.append(values[step])
    (result,) = stack
    return result


def depth(steps: Sequence[int]) -> int:
    """The most values a program keeps at once."""
    height = most = 0
    for step in steps:
        height += -1 if step == ADD else 1
        most = max(most, height)
    return most
