from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.errors import ConfigError
from argosy.move import kernels, slices, trees
from argosy.native import loader

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
EXAMPLES = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def native_paths() -> list[str]:
    """Those this CPU can run."""
    native = loader.library()
    names = ["baseline", "sse4.2", "crc", "avx2"]
    found = [n for n in names if native and native.ag_force_path(n.encode()) == loader.OK]
    if native:
        native.ag_force_path(None)
    return found


@pytest.fixture(params=[*native_paths(), loader.WITHOUT])
def path(request, monkeypatch):
    """Every path in turn: each one this CPU can run, and torch operations."""
    if request.param == loader.WITHOUT:
        monkeypatch.setenv(loader.SWITCH, "0")
        loader.forget()
    else:
        assert loader.library().ag_force_path(request.param.encode()) == loader.OK
    yield request.param
    monkeypatch.delenv(loader.SWITCH, raising=False)
    loader.forget()
    native = loader.library()
    if native is not None:
        native.ag_force_path(None)


def test_a_machine_with_a_compiler_has_native_kernels_on_the_best_path():
    assert loader.library() is not None, loader.state()
    assert kernels.path() == loader.path() != loader.WITHOUT


def test_the_path_says_torch_operations_when_native_code_is_off(path):
    assert kernels.path() == path


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, with every NaN made one: their payload is not promised between torch and native code."""
    tensor = tensor.clone()
    if tensor.dtype.is_floating_point:
        tensor[tensor != tensor] = math.nan
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integer[tensor.element_size()])


def random_tensor(generator: torch.Generator, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all: NaN, infinities, subnormals, both zeros, extreme integers."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    tensor = raw.view(dtype)
    if dtype.is_floating_point and count:
        # Random bits are mostly huge or tiny: mix in numbers of one size, so that rounding decides something.
        usual = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
        choose = torch.rand(count, generator=generator) < 0.7
        tensor = torch.where(choose, usual, tensor)
    return tensor.clone()


def in_order(inputs: list[torch.Tensor], operation: str, factor: float) -> torch.Tensor:
    """The definition, by numpy: one operation after the other, half precision by way of single, rounded once."""
    dtype = inputs[0].dtype
    half = dtype in (torch.bfloat16, torch.float16)
    arrays = [(t.float() if half else t).numpy() for t in inputs]
    with np.errstate(all="ignore"):
        if operation == "premul_sum":
            arrays = [a * a.dtype.type(factor) for a in arrays]
        total = arrays[0].copy()
        for array in arrays[1:]:
            if operation in ("sum", "avg", "premul_sum"):
                total = total + array
            elif operation == "product":
                total = total * array
            elif operation == "min":
                total = np.where((array < total) | (array != array), array, total)
            else:
                total = np.where((array > total) | (array != array), array, total)
        if operation == "avg":
            total = total / total.dtype.type(len(arrays))
    return torch.from_numpy(total).to(dtype)


@EXAMPLES
@given(
    dtype=st.sampled_from(FLOATS + INTEGERS),
    operation=st.sampled_from(list(kernels.OPERATIONS)),
    num_inputs=st.integers(1, 11),
    count=st.one_of(st.integers(0, 70), st.sampled_from([1023, 1024, 1025, 2049, 4099, 8209])),
    skip=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_reduce_equals_one_operation_after_the_other(
    path, dtype, operation, num_inputs, count, skip, seed
):
    if not dtype.is_floating_point and operation in ("avg", "premul_sum"):
        operation = "sum"
    generator = torch.Generator().manual_seed(seed)
    # Every input begins at another element of its memory: nothing may depend on alignment.
    inputs = [
        random_tensor(generator, count + skip + i % 3, dtype)[skip + i % 3 :]
        for i in range(num_inputs)
    ]
    factor = 0.3
    expected = in_order(inputs, operation, factor)
    guarded = random_tensor(generator, count + 2, dtype)
    before = guarded.clone()
    kernels.reduce(guarded[1 : count + 1], inputs, operation, factor)
    assert torch.equal(bits(guarded[1 : count + 1]), bits(expected))
    assert torch.equal(bits(guarded[[0, -1]]), bits(before[[0, -1]]))


@EXAMPLES
@given(
    dtype=st.sampled_from([*FLOATS, torch.int32]),
    operation=st.sampled_from(list(kernels.OPERATIONS)),
    num_inputs=st.integers(1, 9),
    which=st.integers(0, 8),
    seed=st.integers(0, 2**32),
)
def test_the_output_may_be_any_of_the_inputs(path, dtype, operation, num_inputs, which, seed):
    if not dtype.is_floating_point and operation in ("avg", "premul_sum"):
        operation = "product"
    generator = torch.Generator().manual_seed(seed)
    inputs = [random_tensor(generator, 2503, dtype) for _ in range(num_inputs)]
    expected = in_order(inputs, operation, 0.25)
    out = inputs[which % num_inputs]
    kernels.reduce(out, inputs, operation, 0.25)
    assert torch.equal(bits(out), bits(expected))


def test_slices_longer_than_one_are_joined_without_a_seam(path):
    count = slices.SLICE_BYTES // 4 + 17
    inputs = [torch.randn(count, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    out = torch.empty(count)
    kernels.reduce(out, inputs)
    assert torch.equal(out, (inputs[0] + inputs[1]) + inputs[2])
    kernels.reduce_tree(out, inputs, [1, 0, -1, 2, -1])
    assert torch.equal(out, (inputs[1] + inputs[0]) + inputs[2])
    inputs[1].copy_(inputs[0])
    inputs[1][-1] += 1
    assert kernels.changed(inputs[0], inputs[1]).tolist() == [count - 1]


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_survives_the_way_through_single(path, dtype):
    every = all_halves(dtype)
    out = torch.empty_like(every)
    kernels.reduce(out, [every], "max")
    assert torch.equal(bits(out), bits(every))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_halves_round_to_the_nearest_even_number_and_overflow_to_infinity(path, dtype):
    every = all_halves(dtype)
    # All pairs of two numbers at a fixed distance, among them exact ties of every exponent and sums past the largest.
    for distance in (1, 2, 255, 1024, 4097, 30001):
        other = every.roll(distance)
        out = torch.empty_like(every)
        kernels.reduce(out, [every, other])
        assert torch.equal(bits(out), bits((every.float() + other.float()).to(dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_in_any_input_is_the_least_and_the_greatest(path, dtype):
    inputs = [torch.ones(9, dtype=dtype) for _ in range(3)]
    for index, tensor in enumerate(inputs):
        tensor[index] = math.nan
    for operation in ("min", "max", "sum", "avg", "product"):
        out = torch.empty(9, dtype=dtype)
        kernels.reduce(out, inputs, operation)
        assert out.isnan().tolist() == [True] * 3 + [False] * 6


def random_program(draw, first: int, count: int) -> list[int]:
    """A random binary tree over inputs [first, first + count)."""
    if count == 1:
        return [first]
    left = draw(st.integers(1, count - 1))
    return [
        *random_program(draw, first, left),
        *random_program(draw, first + left, count - left),
        -1,
    ]


def by_program(inputs: list[torch.Tensor], program: list[int]) -> torch.Tensor:
    stack: list[np.ndarray] = []
    with np.errstate(all="ignore"):
        for entry in program:
            if entry >= 0:
                stack.append(inputs[entry].float().numpy())
            else:
                right = stack.pop()
                stack.append(stack.pop() + right)
    return torch.from_numpy(stack[0])


@EXAMPLES
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_inputs=st.integers(1, 12),
    count=st.sampled_from([0, 1, 7, 64, 1023, 1025, 2051]),
    seed=st.integers(0, 2**32),
)
def test_a_tree_is_added_in_the_order_of_its_program(path, data, dtype, num_inputs, count, seed):
    program = random_program(data.draw, 0, num_inputs)
    generator = torch.Generator().manual_seed(seed)
    inputs = [random_tensor(generator, count + 1, dtype)[1:] for _ in range(num_inputs)]
    expected = by_program(inputs, program)
    aliased = dtype == torch.float32 and data.draw(st.booleans())
    out = inputs[seed % num_inputs] if aliased else torch.empty(count)
    kernels.reduce_tree(out, inputs, program)
    assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("num_inputs", [2, 3, 4, 5, 6, 7, 8, 16])
def test_balanced_trees_have_the_bits_of_their_definition(path, num_inputs):
    def balanced(first, count):
        if count == 1:
            return [first]
        left = 1 << ((count - 1).bit_length() - 1)
        return [*balanced(first, left), *balanced(first + left, count - left), -1]

    generator = torch.Generator().manual_seed(num_inputs)
    inputs = [torch.randn(5003, generator=generator) * 10**i for i in range(num_inputs)]
    out = torch.empty(5003)
    program = balanced(0, num_inputs)
    kernels.reduce_tree(out, inputs, program)
    assert torch.equal(out, by_program(inputs, program))
    for shuffled in (list(reversed(inputs)), inputs[1:] + inputs[:1]):
        kernels.reduce_tree(out, shuffled, program)
        assert torch.equal(out, by_program(shuffled, program))


def test_a_program_may_be_64_values_deep_and_no_deeper(path):
    inputs = [torch.full((3001,), float(i)) for i in range(64)]
    out = torch.empty(3001)
    kernels.reduce_tree(out, inputs, [*range(64), *[-1] * 63])
    assert torch.equal(out, torch.full((3001,), float(sum(range(64)))))
    with pytest.raises(ConfigError, match="no postfix sum"):
        kernels.reduce_tree(out, [*inputs, inputs[0]], [*range(65), *[-1] * 64])


@pytest.mark.parametrize(
    "program", [[], [0, 1], [-1], [0, -1], [0, 1, -1, -1], [0, 2, -1], [0, -2]]
)
def test_what_is_no_program_is_refused_before_anything_is_written(path, program):
    out = torch.full((5,), 7.0)
    with pytest.raises(ConfigError, match="no postfix sum"):
        kernels.reduce_tree(out, [torch.ones(5), torch.ones(5)], program)
    assert out.tolist() == [7.0] * 5


def bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0x00000000),
        (b"a", 0xC1D04330),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_gives_the_published_values(path, data, crc):
    assert kernels.copy_crc32c(None, bytes_tensor(data)) == crc


def slow_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@EXAMPLES
@given(
    size=st.one_of(st.integers(0, 300), st.integers(3000, 9000)),
    cuts=st.lists(st.integers(0, 9000), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_crc32c_is_the_same_in_any_chunks_and_the_copy_is_whole(path, size, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, 256, (size + 1,), generator=generator, dtype=torch.uint8)[1:]
    target = torch.zeros(size + 2, dtype=torch.uint8)
    borders = sorted({0, size, *(min(cut, size) for cut in cuts)})
    crc = 0
    for start, stop in itertools.pairwise(borders):
        crc = kernels.copy_crc32c(target[1:-1][start:stop], source[start:stop], crc)
    assert crc == slow_crc32c(bytes(source.tolist())) == kernels.copy_crc32c(None, source)
    assert torch.equal(target[1:-1], source)
    assert target[0] == target[-1] == 0


def test_crc32c_of_megabytes_is_the_same_on_every_path(path):
    source = torch.arange(700_003, dtype=torch.int32)
    target = torch.empty_like(source)
    assert kernels.copy_crc32c(target, source) == 0x9AFBD8FC
    assert torch.equal(target, source)


@EXAMPLES
@given(
    dtype=st.sampled_from([*FLOATS, *INTEGERS, torch.bool, torch.complex64]),
    count=st.integers(0, 3000),
    where=st.lists(st.integers(0, 2999), max_size=40),
    seed=st.integers(0, 2**32),
)
def test_changed_names_the_elements_whose_bytes_differ(path, dtype, count, where, seed):
    generator = torch.Generator().manual_seed(seed)
    width = dtype.itemsize
    raw = torch.randint(0, 2, (count * width,), generator=generator, dtype=torch.uint8)
    other = raw.clone()
    expected = sorted({index for index in where if index < count})
    for index in expected:
        other[index * width + index % width] ^= 1
    found = kernels.changed(raw.view(dtype), other.view(dtype))
    assert found.dtype == torch.int64
    assert found.tolist() == expected


def test_changed_finds_all_when_everything_differs(path):
    a = torch.zeros(20_011)
    assert kernels.changed(a, -a).tolist() == list(range(20_011))
    nan = torch.full((20_011,), math.nan)
    assert kernels.changed(nan, nan.clone()).numel() == 0


def test_tensors_of_several_dims_and_none_are_taken_as_they_lie_in_memory(path):
    inputs = [torch.randn(3, 5, 7), torch.randn(3, 5, 7)]
    out = torch.empty(105)
    kernels.reduce(out, inputs)
    assert torch.equal(out.view(3, 5, 7), inputs[0] + inputs[1])
    scalar = torch.tensor(0.0)
    kernels.reduce(scalar, [torch.tensor(2.0), torch.tensor(3.0)], "product")
    assert scalar.item() == 6.0
    parameter = torch.nn.Parameter(torch.ones(3))
    assert kernels.copy_crc32c(None, parameter) == kernels.copy_crc32c(None, parameter.detach())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.reduce(torch.ones(3, 4).t(), [torch.ones(12)]), "out is not contiguous"),
        (
            lambda: kernels.reduce(torch.ones(12), [torch.ones(12), torch.ones(24)[::2]]),
            r"inputs\[1\] is not contiguous",
        ),
        (lambda: kernels.reduce(torch.ones(3), []), "empty"),
        (lambda: kernels.reduce(torch.ones(3), [torch.ones(4)]), r"inputs\[0\] is float32\[4\]"),
        (lambda: kernels.reduce(torch.ones(3), [torch.ones(3).double()]), "cannot reduce"),
        (
            lambda: kernels.reduce(torch.ones(3), [torch.ones(3), torch.ones(3).half()]),
            r"inputs\[1\] is float16\[3\]",
        ),
        (lambda: kernels.reduce(torch.ones(3), [torch.ones(3)], "median"), "median"),
        (lambda: kernels.reduce(torch.ones(3).int(), [torch.ones(3).int()], "avg"), "integers"),
        (lambda: kernels.reduce(torch.ones(3).bool(), [torch.ones(3).bool()]), "cannot reduce"),
        (lambda: kernels.reduce(torch.ones(3, device="meta"), [torch.ones(3)]), "on meta"),
        (lambda: kernels.reduce(torch.ones(3).to_sparse(), [torch.ones(3)]), "sparse"),
        (lambda: kernels.reduce_tree(torch.ones(3).half(), [torch.ones(3)], [0]), "cannot add"),
        (lambda: kernels.copy_crc32c(torch.ones(3), torch.ones(4)), "12 bytes, src 16"),
        (lambda: kernels.copy_crc32c(None, torch.ones(4, 4)[:, 1]), "src is not contiguous"),
        (lambda: kernels.changed(torch.ones(3), torch.ones(3).int()), "b is int32"),
        (
            lambda: kernels.changed(*[torch.ones(3, dtype=torch.complex128)] * 2),
            "cannot be compared",
        ),
    ],
)
def test_bad_tensors_are_refused_by_name_with_a_fix(path, call, words):
    with pytest.raises(ConfigError, match=words) as failure:
        call()
    assert failure.value.fix


def squares_by_hand(page: np.ndarray) -> float:
    lanes = [0.0] * 16
    for place, element in enumerate(page.astype(np.float64)):
        lanes[place % 16] += element * element
    return functools.reduce(lambda total, lane: total + lane, lanes, 0.0)


@pytest.mark.parametrize("num_inputs", [1, 2, 3, 4, 5, 8])
def test_pages_are_added_like_trees_and_their_squares_in_the_order_of_the_page(path, num_inputs):
    torch.manual_seed(num_inputs)
    inputs = [torch.randn(3000) for _ in range(num_inputs)]
    program = trees.program([trees.Node(i, 1) for i in range(num_inputs)], num_inputs)
    bounds = [(0, 1000), (1000, 1016), (1017, 1018), (1100, 3000), (1050, 1050)]
    out = torch.full((3000,), 7.0)
    squares = kernels.reduce_pages(out, inputs, program, bounds)
    expected = torch.full((3000,), 7.0)
    for start, stop in bounds:
        if start < stop:
            pieces = [tensor[start:stop] for tensor in inputs]
            kernels.reduce_tree(expected[start:stop], pieces, program)
    assert torch.equal(out, expected)
    assert squares == [squares_by_hand(expected[start:stop].numpy()) for start, stop in bounds]


def test_pages_that_go_past_the_caches_have_the_same_bits(path):
    # Enough elements for streamed stores, at an address they are not made for.
    inputs = [torch.randn(600_001)[1:] for _ in range(3)]
    out = torch.zeros(600_001)[1:]
    squares = kernels.reduce_pages(
        out, inputs, [0, 1, -1, 2, -1], [(0, 300_000), (300_000, 600_000)]
    )
    assert torch.equal(out, (inputs[0] + inputs[1]) + inputs[2])
    assert squares == [squares_by_hand(half.numpy()) for half in out.split(300_000)]


def test_squares_of_large_elements_are_finite_and_show_what_is_not(path):
    pages = torch.tensor([3e38] * 20 + [math.inf] + [1.0] * 19 + [math.nan] * 20)
    out = torch.empty(60)
    bounds = [(0, 20), (20, 40), (40, 60)]
    large, infinite, not_a_number = kernels.reduce_pages(out, [pages], [0], bounds)
    assert large == pytest.approx(20 * 9e76, rel=1e-6)
    assert math.isinf(infinite)
    assert math.isnan(not_a_number)


@pytest.mark.parametrize("bounds", [[(0, 11)], [(-1, 4)]])
def test_pages_beyond_the_tensors_are_refused(path, bounds):
    with pytest.raises(ConfigError, match="beyond the 10 elements"):
        kernels.reduce_pages(torch.zeros(10), [torch.zeros(10)], [0], bounds)
