"""CRC32C of memory: known values, chunks and cells; native code and numpy agree."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy.checkpoint import checksums
from argosy.checkpoint.checksums import Stretch
from argosy.move import crc32c
from argosy.native import loader


@pytest.fixture(params=["native", "numpy"])
def path(request, monkeypatch):
    if request.param == "native" and loader.library() is None:
        pytest.skip("no native kernels here")
    if request.param == "numpy":
        monkeypatch.setattr(loader, "library", lambda: None)
    checksums._kernel.cache_clear()
    yield request.param
    checksums._kernel.cache_clear()


def test_the_known_value(path):
    assert checksums.of_bytes(b"123456789") == 0xE3069283
    assert checksums.of_bytes(b"") == 0
    assert checksums.of_zeros(32) == 0x8A9136AA


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 12288, 13001])
def test_chunks_are_the_checksums_of_their_bytes(path, size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    found = checksums.of_chunks(data.ctypes.data, size, 4096)
    parts = [data[at : at + 4096].tobytes() for at in range(0, size, 4096)]
    assert found.tolist() == [checksums.of_bytes(part) for part in parts]
    zeros = checksums.of_zero_chunks(size, 4096)
    assert zeros.tolist() == [checksums.of_bytes(bytes(len(part))) for part in parts]


@pytest.mark.parametrize(
    ("rows", "bands", "width", "per_cell"),
    [
        (10, 4, 24, 3),
        (7, 8, 3, 7),
        (5, 1, 64, 2),
        (9, 2, 8, 1),
        (6, 9, 1029, 4),
        (3, 5, 4000, 2),
        (0, 3, 8, 2),
    ],
)
def test_cells_are_the_checksums_of_their_rows_in_order(path, rows, bands, width, per_cell):
    data = np.random.default_rng(3).integers(0, 256, (rows, bands * width), dtype=np.uint8)
    found = checksums.of_cells(data.ctypes.data, rows, width, bands, per_cell)
    expected = [
        checksums.of_bytes(
            np.ascontiguousarray(
                data[first : first + per_cell, band * width : (band + 1) * width]
            ).tobytes()
        )
        for first in range(0, rows, per_cell)
        for band in range(bands)
    ]
    assert found.tolist() == expected


def linear(data):
    """The CRC32C against that of as many zeros, by numpy."""
    flat = np.ascontiguousarray(data).reshape(-1)
    return crc32c.extend(0, flat) ^ crc32c.extend(0, np.zeros_like(flat))


def cells_by_numpy(data, one):
    """The cells of a stretch, from the whole matrix with zeros where the stretch has nothing."""
    matrix = np.zeros(one.num_rows * one.num_bands * one.band_bytes, dtype=np.uint8)
    matrix[one.start : one.start + one.num_bytes] = data[one.at : one.at + one.num_bytes]
    bands = matrix.reshape(one.num_rows, one.num_bands, one.band_bytes)
    last = one.first_group + one.num_cells // one.num_bands
    return [
        linear(bands[group * one.rows_per_cell : (group + 1) * one.rows_per_cell, band])
        for group in range(one.first_group, last)
        for band in range(one.num_bands)
    ]


@st.composite
def blocks(draw):
    """The size of a block, and stretches in it: of narrow and wide bands, at any place of their matrices."""
    size = draw(st.integers(0, 20_000))
    stretches, at = [], 0
    for _ in range(draw(st.integers(0, 3))):
        at += draw(st.integers(0, 200))
        band_bytes = draw(st.integers(1, 40) | st.sampled_from([256, 384, 512, 1000, 2049]))
        num_bands, rows_per_cell = draw(st.integers(1, 9)), draw(st.integers(1, 5))
        row_bytes = band_bytes * num_bands
        num_rows = draw(st.integers(1, max(1, 8000 // row_bytes)))
        start = draw(st.integers(0, num_rows * row_bytes - 1))
        room = min(size - at, num_rows * row_bytes - start)
        if room < 1:
            break
        num_bytes = draw(st.just(room) | st.integers(1, room))
        cut = (num_rows, band_bytes, num_bands, rows_per_cell)
        stretches.append(Stretch(at, num_bytes, start, *cut))
        at += num_bytes
    return size, stretches


@pytest.mark.parametrize("forced", ["baseline", "sse4.2", "crc", ""])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    block=blocks(), chunk_bytes=st.sampled_from([64, 1000, 4096, 65536]), offset=st.integers(0, 8)
)
def test_one_pass_gives_chunks_and_cells_of_stretches(forced, block, chunk_bytes, offset):
    native = loader.library()
    if native is None or native.ag_force_path(forced.encode()) != loader.OK:
        pytest.skip("not on this machine")
    size, stretches = block
    data = np.random.default_rng(size).integers(0, 256, size + offset, dtype=np.uint8)[offset:]
    try:
        chunks, cells = checksums.of_block(data.ctypes.data, size, chunk_bytes, stretches)
    finally:
        native.ag_force_path(None)
    assert chunks.tolist() == [
        linear(data[at : at + chunk_bytes]) for at in range(0, size, chunk_bytes)
    ]
    assert [one.tolist() for one in cells] == [cells_by_numpy(data, one) for one in stretches]


@st.composite
def scattered(draw):
    """A block as above, where its pieces end, and how its destination lies in a word."""
    size, stretches = draw(blocks())
    cuts = draw(st.lists(st.integers(0, size), max_size=4) | st.just([size // 16 * 8]))
    return size, stretches, [0, *sorted(cuts), size], draw(st.sampled_from([0, 0, 1, 4]))


@pytest.mark.parametrize("forced", ["baseline", "sse4.2", "crc", ""])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(block=scattered(), chunk_bytes=st.sampled_from([64, 1000, 4096, 65536]))
def test_pieces_are_brought_together_and_summed_in_one_pass(forced, block, chunk_bytes):
    native = loader.library()
    if native is None or native.ag_force_path(forced.encode()) != loader.OK:
        pytest.skip("not on this machine")
    size, stretches, cuts, lead = block
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    own = [data[low:high].copy() for low, high in itertools.pairwise(cuts)]
    pieces = [(one.ctypes.data, one.size) for one in own]
    room = np.full(size + lead + 64, 7, dtype=np.uint8)
    try:
        chunks, cells = checksums.of_gathered(
            room.ctypes.data + lead, pieces, chunk_bytes, stretches
        )
        apart = checksums.of_pieces(pieces, chunk_bytes)
        known, known_cells = checksums.of_block(data.ctypes.data, size, chunk_bytes, stretches)
    finally:
        native.ag_force_path(None)
    assert room[lead : lead + size].tolist() == data.tolist()
    assert set(room[:lead]) <= {7}
    assert set(room[lead + size :]) == {7}
    assert chunks.tolist() == known.tolist()
    assert apart.tolist() == checksums.of_chunks(data.ctypes.data, size, chunk_bytes).tolist()
    assert [one.tolist() for one in cells] == [one.tolist() for one in known_cells]


def test_pieces_have_the_same_checksums_without_native_code(path):
    data = np.random.default_rng(6).integers(0, 256, 9000, dtype=np.uint8)
    pieces = [(data.ctypes.data, 5000), (data.ctypes.data + 5000, 4000)]
    room = np.zeros(9000, dtype=np.uint8)
    chunks, _ = checksums.of_gathered(room.ctypes.data, pieces, 4096, [])
    assert room.tolist() == data.tolist()
    assert chunks.tolist() == [linear(data[at : at + 4096]) for at in range(0, 9000, 4096)]
    known = checksums.of_chunks(data.ctypes.data, 9000, 4096)
    assert checksums.of_pieces(pieces, 4096).tolist() == known.tolist()


def test_without_native_code_a_block_has_the_same_chunks_and_no_cells(path):
    data = np.random.default_rng(5).integers(0, 256, 9000, dtype=np.uint8)
    stretch = Stretch(0, 8192, 0, 4, 256, 8, 2)
    chunks, cells = checksums.of_block(data.ctypes.data, 9000, 4096, [stretch])
    assert chunks.tolist() == [linear(data[at : at + 4096]) for at in range(0, 9000, 4096)]
    expected = [cells_by_numpy(data, stretch)] if path == "native" else []
    assert [one.tolist() for one in cells] == expected


@pytest.mark.skipif(loader.library() is None, reason="no native kernels here")
def test_cells_of_more_than_a_table_of_zeros_moves_past_are_right():
    one = Stretch(0, 5, 0, 2, 1 << 25, 1, 2)
    data = np.arange(1, 6, dtype=np.uint8)
    _, (cells,) = checksums.of_block(data.ctypes.data, 5, 4096, [one])
    matrix = np.zeros(2 << 25, dtype=np.uint8)
    matrix[:5] = data
    assert cells.tolist() == [checksums.of_bytes(matrix) ^ checksums.of_zeros(matrix.size)]
