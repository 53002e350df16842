"""The block writer: the same file from tensors anywhere, from an image in memory, and from several writers."""

import ctypes
import os
import threading

import pytest
import torch

from argosy.checkpoint import checksums, tables
from argosy.checkpoint.blocks import BlockWriter
from argosy.checkpoint.directio import BLOCKS, Buffer
from argosy.checkpoint.entries import entry_of
from argosy.checkpoint.gathering import TensorSource
from argosy.checkpoint.layouts import plan_image
from argosy.checkpoint.shares import plan_shares
from argosy.checkpoint.sources import ImageSource
from argosy.errors import HomeError


def entries():
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "large": torch.randn(3000, 1024, generator=generator),
        "turned": torch.randn(700, 300, generator=generator).t(),
        "every second": torch.randn(64, 64, generator=generator)[::2, ::2],
        "bytes": torch.randint(0, 255, (1001,), dtype=torch.uint8, generator=generator),
        "number": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }
    return [entry_of(name, tensor, "model") for name, tensor in tensors.items()]


@pytest.fixture
def directory(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield tmp_path, descriptor
    os.close(descriptor)


def written_alone(path, descriptor, made):
    image = plan_image(entry.wanted for entry in made)
    holders = {entry.name: {0: entry.boxes} for entry in made}
    duties = plan_shares(image, holders, [0])[0]
    written = BlockWriter(descriptor, image, TensorSource(image, made)).write(duties)
    (file,) = image.files
    return image, duties, written, (path / file.name).read_bytes()


def test_the_file_is_what_the_image_says_and_the_table_its_checksums(directory):
    path, descriptor = directory
    made = entries()
    image, _, written, data = written_alone(path, descriptor, made)
    (file,) = image.files
    assert len(data) == file.size
    assert data[: len(file.header)] == file.header
    for entry in made:
        slot = next(one for one in file.slots if one.name == entry.name)
        expected = entry.buffers[0].contiguous().numpy().tobytes()
        assert data[slot.offset : slot.stop] == expected, entry.name
    table = tables.join(file.size, 65536, written)
    parts = [data[at : at + 65536] for at in range(0, file.size, 65536)]
    assert table.tolist() == [checksums.of_bytes(part) for part in parts]


def test_an_image_in_memory_gives_the_same_file_without_gathering(directory):
    path, descriptor = directory
    image, duties, written, data = written_alone(path, descriptor, entries())
    memory = Buffer(-(-len(data) // 4096) * 4096)
    memory.memory[: len(data)] = data
    (path / image.files[0].name).unlink()
    source = ImageSource(image, [memory.address])
    again = BlockWriter(descriptor, image, source).write(duties)
    assert (path / image.files[0].name).read_bytes() == data
    key = lambda one: one.start  # noqa: E731
    assert sorted(again, key=key) == sorted(written, key=key)
    assert all(source.view(duty) == memory.address + duty.start for duty in duties)


def test_tensors_aligned_as_the_file_are_not_copied(directory):
    _, descriptor = directory
    memory = Buffer(16 << 20)
    aligned = torch.frombuffer(memory.memory, dtype=torch.float32).view(4096, 1024)
    made = [entry_of("w", aligned, "model")]
    image = plan_image(entry.wanted for entry in made)
    source = TensorSource(image, made)
    duties = plan_shares(image, {"w": {0: made[0].boxes}}, [0])[0]
    views = [source.view(duty) for duty in duties]
    first = image.files[0].slots[0].offset
    assert views == [None, memory.address + (8 << 20) - first, memory.address + (16 << 20) - first]
    BlockWriter(descriptor, image, source).write(duties)
    del source, made, aligned


def test_a_block_of_plain_tensors_is_gathered_and_summed_in_one_pass(directory, monkeypatch):
    path, descriptor = directory
    made = [entry_of(f"layer {number}", torch.randn(300, 1024), "model") for number in range(9)] + [
        entry_of("number", torch.tensor(3.5), "model")
    ]
    monkeypatch.setattr(TensorSource, "fill", None)
    monkeypatch.setattr(checksums, "of_block", None)
    image, _, written, data = written_alone(path, descriptor, made)
    (file,) = image.files
    for entry in made:
        slot = next(one for one in file.slots if one.name == entry.name)
        assert data[slot.offset : slot.stop] == entry.buffers[0].numpy().tobytes(), entry.name
    chunk_bytes = tables.chunk_bytes_for(file.size)
    known = [
        checksums.of_bytes(data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)
    ]
    assert tables.join(file.size, chunk_bytes, written).tolist() == known


def test_pace_is_asked_before_every_block_and_may_end_the_save(directory):
    _, descriptor = directory
    made = entries()
    image = plan_image(entry.wanted for entry in made)
    duties = plan_shares(image, {entry.name: {0: entry.boxes} for entry in made}, [0])[0]
    asked, lock = [], threading.Lock()

    def pace(num_bytes):
        with lock:
            asked.append(num_bytes)
            if len(asked) > 1:
                raise HomeError("no more")

    writer = BlockWriter(descriptor, image, TensorSource(image, made), pace=pace, threads=1)
    with pytest.raises(HomeError, match="no more"):
        writer.write(duties)
    assert asked[0] == 8 << 20


def test_blocks_are_lent_to_one_at_a_time_and_come_back():
    with BLOCKS.lent() as first, BLOCKS.lent() as second:
        assert first.address != second.address
        ctypes.memset(first.address, 1, len(first))
        kept = {first.address, second.address}
    with BLOCKS.lent() as again:
        assert again.address in kept
