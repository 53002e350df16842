"""CRC32C of memory: known values, chunks and cells; native code and numpy agree."""

import numpy as np
import pytest

from argosy.checkpoint import checksums
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
