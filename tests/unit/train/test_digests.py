"""Digests of tensors: equal for equal bits alone, wherever they lie."""

import pytest
import torch

from argosy.train import digests


def test_equal_bits_have_equal_digests_in_whatever_memory_they_lie():
    plain = torch.arange(24, dtype=torch.float32).view(4, 6)
    strided = plain.t().contiguous().t()
    unaligned = torch.zeros(25)[1:].copy_(plain.view(-1)).view(4, 6)
    halves = plain.to(torch.bfloat16)
    odd = torch.zeros(25, dtype=torch.bfloat16)[1:].copy_(halves.view(-1))
    assert digests.of_tensor(plain) == digests.of_tensor(strided) == digests.of_tensor(unaligned)
    assert digests.of_tensor(halves) == digests.of_tensor(odd)


@pytest.mark.parametrize("place", [0, 11, 12])
def test_one_bit_makes_another_digest(place):
    values = torch.zeros(13)
    other = values.clone()
    other.view(torch.int32)[place] ^= 1
    assert digests.of_tensor(values) != digests.of_tensor(other)


def test_zeros_of_different_sign_and_exchanged_elements_make_another_digest():
    zero, negative = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    exchanged = torch.arange(64.0)
    exchanged[[8, 40]] = exchanged[[40, 8]]
    assert digests.of_tensor(zero) != digests.of_tensor(negative)
    assert digests.of_tensor(torch.arange(64.0)) != digests.of_tensor(exchanged)


@pytest.mark.parametrize("value", [torch.tensor(3.0), torch.zeros(0), torch.tensor([True, False])])
def test_numbers_flags_and_nothing_have_digests_of_63_bits(value):
    digest = digests.of_tensor(value)
    assert digest == digests.of_tensor(value.clone())
    assert 0 < digest < 1 << 63
