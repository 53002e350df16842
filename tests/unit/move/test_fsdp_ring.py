"""The ring of common slots behind `fsdp_fast_path`: a slot is never said to be free while a tensor of it lives."""

from __future__ import annotations

import os

import torch

from argosy.move import fsdp, mapping, waits


class Alone:
    """A group of one rank, with memory of its own."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def common_memory(self, size: int) -> mapping.Mapping:
        descriptor = os.memfd_create("ring")
        try:
            os.ftruncate(descriptor, size)
            return mapping.Mapping(descriptor, size, is_private=False, is_prefaulted=False)
        finally:
            os.close(descriptor)


def released(ring: fsdp._Ring, slot: int) -> int:
    return waits.peek(ring._word(0, slot))


def test_a_slot_comes_again_when_its_tensor_has_died():
    ring = fsdp._Ring(Alone(), 4096, 1)
    for turn in range(3 * fsdp.NUM_SLOTS):
        tensor = ring.take(4, torch.float32, 0)
        assert tensor is not None
        assert released(ring, turn % fsdp.NUM_SLOTS) <= turn
        del tensor
        assert released(ring, turn % fsdp.NUM_SLOTS) == turn + 1


def test_a_slot_whose_tensor_lives_is_passed_over_and_free_again_afterwards():
    ring = fsdp._Ring(Alone(), 4096, 1)
    kept = [ring.take(4, torch.float32, 0) for _ in range(fsdp.NUM_SLOTS)]
    assert [ring.take(4, torch.float32, 0) for _ in kept] == [None] * fsdp.NUM_SLOTS
    kept.clear()
    assert all(ring.take(4, torch.float32, 0) is not None for _ in range(fsdp.NUM_SLOTS))


def test_a_tensor_that_dies_while_its_slot_is_taken_again_does_not_release_the_next_one():
    ring = fsdp._Ring(Alone(), 4096, 1)
    kept = [ring.take(4, torch.float32, 0) for _ in range(fsdp.NUM_SLOTS)]

    class DropsFirst(list):
        """The collector may free a tensor at any moment: here it does when `take` looks."""

        def __getitem__(self, index):
            kept.clear()
            return super().__getitem__(index)

    ring._held = DropsFirst(ring._held)
    turn = ring._turn
    tensor = ring.take(4, torch.float32, 0)
    assert tensor is not None
    assert released(ring, turn % fsdp.NUM_SLOTS) <= turn
