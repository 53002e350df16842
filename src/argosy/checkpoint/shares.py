"""Who writes what: every block of every file to a process that holds all of it, and otherwise its fragments to processes that do.

Every process computes the same shares from the same image and the same holders. Replicas share the work: a tensor that several hold whole is written
by one of them, a block of sharded ones goes to the holder that has
least to write so far. Pure; the block writer carries duties out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from argosy.checkpoint.layouts import FileImage, Image, Slot
from argosy.checkpoint.ranges import boxes_of_range
from argosy.checkpoint.tables import BLOCK_BYTES
from argosy.move.boxes import Box
from argosy.move.overlaps import NotCovered

HEADER = -1
"""Number of the fragment that is the file's header."""

Holders = Mapping[str, Mapping[int, Sequence[Box]]]
"""tensor → rank → boxes that the rank holds."""


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """A box of a slot (by its number in the file), within the duty's block."""

    slot: int
    box: Box


class Duty(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, stop) of a file, one block: all of them, or the fragments that this process adds."""

    file: int
    start: int
    stop: int
    fragments: tuple[Fragment, ...] | None = None


def plan_shares(image: Image, holders: Holders, ranks: Sequence[int]) -> dict[int, list[Duty]]:
    """Duties by rank; NotCovered names a tensor of which nobody holds a part."""
    if len(ranks) > 1:
        holders = _one_each(image, holders)
    load = dict.fromkeys(ranks, 0)
    shares: dict[int, list[Duty]] = {rank: [] for rank in ranks}
    for number, file in enumerate(image.files):
        whole = {slot.name: _whole_holders(slot, holders) for slot in file.slots}
        first = 0
        for start in range(0, file.size, BLOCK_BYTES):
            stop = min(file.size, start + BLOCK_BYTES)
            while first < len(file.slots) and file.slots[first].stop <= start:
                first += 1
            inside = _slots_inside(file, first, stop)
            able = _able(file, inside, (start, stop), whole, holders, set(ranks))
            if able:
                rank = min(able, key=lambda one: (load[one], one))
                shares[rank].append(Duty(number, start, stop))
                load[rank] += stop - start
                continue
            parts = _fragments(file, inside, (start, stop), holders, load)
            for rank, fragments in sorted(parts.items()):
                shares[rank].append(Duty(number, start, stop, tuple(fragments)))
    return shares


def _one_each(image: Image, holders: Holders) -> Holders:
    """Of a tensor that several hold whole one writes all: should replicas differ, a checkpoint has one of them and no mixture."""
    able: dict[str, list[int]] = {}
    for file in image.files:
        for slot in file.slots:
            whole = _whole_holders(slot, holders) if slot.box is None else frozenset()
            if len(whole) > 1:
                able[slot.name] = sorted(whole)
    slots = [slot for file in image.files for slot in file.slots if slot.name in able]
    total, before = sum(slot.num_bytes for slot in slots), 0
    found = dict(holders)
    for slot in slots:
        # By place in the files, so that neighbours go to one process and blocks stay whole.
        ranks = able[slot.name]
        rank = ranks[(before + slot.num_bytes // 2) * len(ranks) // total]
        found[slot.name] = {rank: holders[slot.name][rank]}
        before += slot.num_bytes
    return found


def block_range(slot: Slot, start: int, stop: int) -> tuple[int, int]:
    """Elements of a slot that lie in bytes [start, stop) of its file."""
    low, high = max(start, slot.offset), min(stop, slot.stop)
    if low >= high:
        return 0, 0
    return (low - slot.offset) // slot.item_bytes, (high - slot.offset) // slot.item_bytes


def _slots_inside(file: FileImage, first: int, stop: int) -> list[int]:
    found = []
    for place in range(first, len(file.slots)):
        if file.slots[place].offset >= stop:
            break
        if file.slots[place].num_bytes:
            found.append(place)
    return found


def _whole_holders(slot: Slot, holders: Holders) -> frozenset[int]:
    if not slot.num_bytes:
        return frozenset()
    boxes = boxes_of_range(slot.shape, 0, slot.num_bytes // slot.item_bytes)
    return frozenset(r for r, held in holders.get(slot.name, {}).items() if _has(held, boxes))


def _has(held: Sequence[Box], wanted: list[Box]) -> bool:
    """Whether the boxes are all within the held ones."""
    rest = wanted
    for box in held:
        rest = [piece for one in rest for piece in one.subtract(box)]
        if not rest:
            return True
    return not rest


def _able(
    file: FileImage,
    inside: list[int],
    block: tuple[int, int],
    whole: Mapping[str, frozenset[int]],
    holders: Holders,
    ranks: set[int],
) -> set[int]:
    """Ranks that hold every byte of a block; the header is known to all."""
    able = ranks
    for place in inside:
        slot = file.slots[place]
        have = whole[slot.name] & able
        others = able - have
        if others:
            boxes = boxes_of_range(slot.shape, *block_range(slot, *block))
            held = holders.get(slot.name, {})
            have |= {rank for rank in others if rank in held and _has(held[rank], boxes)}
        able = set(have)
        if not able:
            break
    return able


def _fragments(
    file: FileImage,
    inside: list[int],
    block: tuple[int, int],
    holders: Holders,
    load: dict[int, int],
) -> dict[int, list[Fragment]]:
    found: dict[int, list[Fragment]] = {}
    if block[0] < len(file.header):
        size = min(len(file.header), block[1]) - block[0]
        rank = min(load)
        found[rank] = [Fragment(HEADER, Box((block[0],), (size,)))]
    for place in inside:
        slot = file.slots[place]
        rest = boxes_of_range(slot.shape, *block_range(slot, *block))
        held = holders.get(slot.name, {})
        for rank in sorted(held, key=lambda one: (load[one], one)):
            for box in held[rank]:
                taken = [cut for one in rest if (cut := one.intersect(box)) is not None]
                rest = [piece for one in rest for piece in one.subtract(box)]
                if taken:
                    found.setdefault(rank, []).extend(Fragment(place, cut) for cut in taken)
                    load[rank] += sum(cut.volume for cut in taken) * slot.item_bytes
        if rest:
            raise NotCovered(slot.name, rest[0])
    return found


def plan_boxes(
    tensors: Sequence[tuple[str, int]], holders: Holders, ranks: Sequence[int]
) -> dict[int, dict[str, list[Box]]]:
    """Which rank stores which boxes where each writes files of its own; tensors are (name, bytes of an element).

    A box that several hold goes to the one with least so far; boxes that overlap without being equal are cut.
    """
    load = dict.fromkeys(ranks, 0)
    found: dict[int, dict[str, list[Box]]] = {rank: {} for rank in ranks}
    for name, item_bytes in tensors:
        by_box: dict[Box, list[int]] = {}
        for rank, held in sorted(holders.get(name, {}).items()):
            for box in held:
                by_box.setdefault(box, []).append(rank)
        taken: list[Box] = []
        for box, owners in by_box.items():
            rest = [box]
            for other in taken:
                rest = [piece for one in rest for piece in one.subtract(other)]
            if rest:
                rank = min(owners, key=lambda one: (load[one], one))
                found[rank].setdefault(name, []).extend(rest)
                load[rank] += sum(one.volume for one in rest) * item_bytes
                taken += rest
    return found
