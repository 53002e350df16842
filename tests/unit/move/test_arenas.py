"""Arenas of one process: allocation, directory, views, ends."""

import torch

from argosy.move import arenas


def test_a_tensor_is_found_again_by_its_name():
    with arenas.create("weights", 1 << 20) as arena:
        made = arena.empty((3, 4), torch.bfloat16, name="a")
        assert made.data_ptr() % 4096 == 0
        assert made.untyped_storage().nbytes() == 24
        assert not made._is_view()
        made.fill_(2.5)
        with arenas.open("weights") as again:
            assert torch.equal(again.tensor("a"), made)
            assert again.address != arena.address
