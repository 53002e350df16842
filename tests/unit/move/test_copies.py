"""Copies of every shape and layout give what torch's own assignment gives, by native code and without it."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from argosy.move.copies import blocks, copy_from_process, copy_mapped  # noqa: E402
from argosy.move.plans import Copy  # noqa: E402
from argosy.move.rows import copy_bytes  # noqa: E402
from argosy.native import loader  # noqa: E402


@pytest.fixture(params=["native", "torch"], scope="module")
def path(request):
    before = os.environ.get(loader.SWITCH)
    if request.param == "torch":
        os.environ[loader.SWITCH] = "0"
    loader.forget()
    yield request.param
    if before is None:
        os.environ.pop(loader.SWITCH, None)
    else:
        os.environ[loader.SWITCH] = before
    loader.forget()


@st.composite
def memories(draw):
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=0, max_size=3)))
    begins = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, n - b)) for n, b in zip(shape, begins, strict=True)]
    orders = [draw(st.permutations(range(len(shape)))) for _ in range(2)]
    return shape, begins, sizes, orders


def laid_out(shape, order):
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim], step = step, step * shape[dim]
    return torch.empty_strided(shape, strides)


@settings(max_examples=120, deadline=None)
@given(memories(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_copy_is_the_assignment_of_a_slice(path, memory, is_streamed, dtype):
    shape, begins, sizes, orders = memory
    count = int(torch.Size(shape).numel())
    source = laid_out(shape, orders[0]).copy_(torch.arange(count).reshape(shape))
    where = tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))
    expected = laid_out(shape, orders[1]).fill_(-1).to(dtype)
    expected[where] = source[where].to(dtype)

    def begin(tensor):
        return sum(b * s for b, s in zip(begins, tensor.stride(), strict=True))

    for copy in (copy_mapped, copy_from_process):
        target = laid_out(shape, orders[1]).fill_(-1).to(dtype)
        one = Copy(
            "w",
            tuple(sizes),
            0,
            0,
            begin(source),
            source.stride(),
            0,
            begin(target),
            target.stride(),
        )
        if copy is copy_mapped:
            copy(one, target, source, None, is_streamed=is_streamed)
        else:
            copy(one, target, os.getpid(), source.data_ptr(), source.dtype)
        assert torch.equal(target, expected), copy


@pytest.mark.parametrize("width", [256, 300, 5000])
def test_long_rows_stored_past_the_caches_are_whole_at_any_alignment(path, width):
    source = torch.randn(37, width + 9)
    for skew in (0, 1, 3):
        memory = torch.zeros(37 * width + 16)
        target = memory[skew : skew + 37 * width].view(37, width)
        one = Copy("w", (37, width), 0, 0, 5, (width + 9, 1), 0, 0, (width, 1))
        copy_mapped(one, target, source, None, is_streamed=True)
        assert torch.equal(target, source[:, 5 : 5 + width])
        assert memory[:skew].eq(0).all()
        assert memory[skew + 37 * width :].eq(0).all()


@pytest.mark.parametrize("width", [256, 301, 319])
def test_rows_with_room_between_them_leave_that_room_alone(path, width):
    source = torch.randn(37, width + 9)
    for skew in (0, 1, 15):
        memory = torch.zeros(37 * 320 + 16)
        target = memory[skew : skew + 37 * 320].view(37, 320)
        one = Copy("w", (37, width), 0, 0, 5, (width + 9, 1), 0, 0, (320, 1))
        copy_mapped(one, target, source, None, is_streamed=True)
        assert torch.equal(target[:, :width], source[:, 5 : 5 + width])
        assert target[:, width:].eq(0).all()
        assert memory[:skew].eq(0).all()
        assert memory[skew + 37 * 320 :].eq(0).all()


@pytest.mark.parametrize("size", [0, 1, 63, 4096, (1 << 18) - 1, 1 << 18, (1 << 18) + 77])
@pytest.mark.parametrize(("to", "at"), [(0, 0), (1, 0), (0, 3), (63, 17)])
def test_bytes_are_copied_by_address_and_nothing_beside_them(path, size, to, at):
    source = torch.randint(0, 256, (size + at,), dtype=torch.uint8)
    target = torch.full((to + size + 64,), 7, dtype=torch.uint8)
    copy_bytes(target.data_ptr() + to, source.data_ptr() + at, size)
    assert torch.equal(target[to : to + size], source[at:])
    assert (target[:to] == 7).all()
    assert (target[to + size :] == 7).all()


def test_blocks_are_bounded_and_cover_every_element_once():
    for sizes, most in (((7, 5, 3), 10), ((100,), 7), ((), 4), ((3, 1000), 64)):
        seen = torch.zeros(sizes)
        for block in blocks(sizes, most):
            assert seen[block].numel() <= most
            seen[block] += 1
        assert seen.eq(1).all()
