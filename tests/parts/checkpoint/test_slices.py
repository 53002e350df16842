"""Shards of any dim are read and checked for little more than their own bytes."""

import pytest
import torch

from argosy.checkpoint import Checkpointer, checksums, tables
from argosy.checkpoint.bands import grid_of, join, stretch_of
from argosy.checkpoint.tables import CellsWritten
from argosy.errors import CheckpointDamaged
from argosy.native import loader

needs_native = pytest.mark.skipif(loader.library() is None, reason="cells are made by native code")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("slices")
    torch.manual_seed(0)
    state = {
        "model": torch.nn.ParameterDict(
            {
                "square": torch.nn.Parameter(torch.randn(1024, 1024)),
                "wide": torch.nn.Parameter(torch.randn(300, 4096).bfloat16()),
                "deep": torch.nn.Parameter(torch.randn(64, 48, 128)),
                "odd": torch.nn.Parameter(torch.randn(701, 333)),
            }
        )
    }
    Checkpointer(path).save(1, state)
    return path, {name: p.detach() for name, p in state["model"].items()}


def quarters(shape, dim):
    size = shape[dim] // 4
    for part in range(4):
        index = [slice(None)] * len(shape)
        index[dim] = slice(part * size, (part + 1) * size)
        yield tuple(index)


@needs_native
@pytest.mark.parametrize(
    ("name", "dim"), [("square", 0), ("square", 1), ("wide", 1), ("deep", 0), ("deep", 1)]
)
def test_a_quarter_takes_at_most_a_tenth_more_than_it_is(store, name, dim):
    path, tensors = store
    with Checkpointer(path).open(1) as opened:
        for index in quarters(tensors[name].shape, dim):
            lazy = opened.tensor(name)
            found = lazy[index]
            assert torch.equal(found, tensors[name][index])
            assert lazy.statistics.bytes_wanted == found.numel() * found.element_size()
            assert lazy.statistics.bytes_read <= 1.1 * lazy.statistics.bytes_wanted


def test_slices_across_bands_and_groups_are_right(store):
    path, tensors = store
    generator = torch.Generator().manual_seed(1)
    with Checkpointer(path).open(1) as opened:
        for name, tensor in tensors.items():
            for _ in range(12):
                index = []
                for size in tensor.shape:
                    low, high = sorted(
                        torch.randint(0, size + 1, (2,), generator=generator).tolist()
                    )
                    index.append(slice(low, high))
                assert torch.equal(opened.tensor(name)[tuple(index)], tensor[tuple(index)]), index


@needs_native
def test_a_changed_column_is_found_by_who_reads_it_and_by_nobody_else(store, tmp_path):
    import shutil

    path, tensors = store
    shutil.copytree(path, tmp_path / "copy")
    file = tmp_path / "copy" / "step-000000001" / "model-00001-of-00001.safetensors"
    with Checkpointer(tmp_path / "copy").open(1) as opened:
        offset = opened.manifest.tensors["square"].parts[0].offset
    with open(file, "r+b") as changed:
        changed.seek(offset + 4 * (1024 * 500 + 700))
        changed.write(b"\x01\x02\x03\x04")
    with Checkpointer(tmp_path / "copy").open(1) as opened:
        with pytest.raises(
            CheckpointDamaged, match=r"rows 448 to 512 of square|rows 384 to 512 of square"
        ):
            opened.tensor("square")[:, 512:768]
        assert torch.equal(opened.tensor("square")[:, 0:256], tensors["square"][:, 0:256])
        with pytest.raises(CheckpointDamaged, match="square"):
            opened.tensor("square").read()


@needs_native
@pytest.mark.parametrize("cut", [1, 4096, 70_000, 1_000_000, 3_999_999])
def test_cells_do_not_depend_on_how_a_tensor_was_cut_into_blocks(cut):
    data = torch.randint(0, 255, (1001, 4096), dtype=torch.uint8)
    grid = grid_of(data.shape, 1)
    total, at = data.numel(), data.data_ptr()

    def written(start, stop):
        stretch = stretch_of(grid, start, stop, 0)
        _, (cells,) = checksums.of_block(at + start, stop - start, 65536, [stretch])
        return CellsWritten("x", stretch.first_group, tables.pack(cells))

    step = max(cut, 65536)
    parts = [written(start, min(total, start + step)) for start in range(0, total, step)]
    whole = checksums.of_cells(at, grid.num_rows, grid.band_bytes, grid.count, grid.rows)
    assert join(grid, parts) == join(grid, [written(0, total)])
    assert join(grid, parts).crc32c == tables.pack(whole)
