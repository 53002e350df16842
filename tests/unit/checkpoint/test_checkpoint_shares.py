"""Who writes what: every byte once, by a process that has it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import checksums, shares, tables
from argosy.checkpoint.layouts import Wanted, plan_image
from argosy.checkpoint.shares import plan_shares
from argosy.checkpoint.sources import runs_of_duty
from argosy.move.boxes import Cut, held_by_all
from argosy.move.overlaps import NotCovered

BLOCK = 8192


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(shares, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(tables, "BLOCK_BYTES", BLOCK)


@st.composite
def worlds(draw):
    """Tensors laid over a mesh of two axes, each cut or replicated by either."""
    mesh = (draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    tensors, holders = [], {}
    for place in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.sampled_from([1, 3, 8, 40]), min_size=1, max_size=3)))
        dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
        held = held_by_all(shape, mesh, [Cut(draw(dims)), Cut(draw(dims))])
        dtype = draw(st.sampled_from(["float32", "uint8", "float64"]))
        tensors.append(Wanted(name=f"t{place}", dtype=dtype, shape=shape, kind="model"))
        holders[f"t{place}"] = {
            rank: [one.box for one in own] for rank, own in enumerate(held) if own
        }
    return plan_image(tensors), holders, list(range(math.prod(mesh)))


@settings(max_examples=20, deadline=None)
@given(worlds())
def test_every_byte_is_written_once_by_a_holder(world):
    image, holders, ranks = world
    planned = plan_shares(image, holders, ranks)
    for number, file in enumerate(image.files):
        count = np.zeros(file.size, dtype=int)
        for rank, duties in planned.items():
            for duty in duties:
                if duty.file != number:
                    continue
                for start, stop in runs_of_duty(file, duty):
                    assert duty.start <= start < stop <= duty.stop
                    count[start:stop] += 1
                for fragment in duty.fragments or ():
                    if fragment.slot != shares.HEADER:
                        held = holders[file.slots[fragment.slot].name][rank]
                        assert any(box.intersect(fragment.box) == fragment.box for box in held)
        assert (count == 1).all()


@settings(max_examples=15, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_checksums_of_all_writers_join_to_the_checksum_of_the_file(world, random):
    image, holders, ranks = world
    planned = plan_shares(image, holders, ranks)
    for number, file in enumerate(image.files):
        content = np.frombuffer(random.randbytes(file.size), dtype=np.uint8)
        written = []
        for duties in planned.values():
            for duty in duties:
                if duty.file == number:
                    mine = np.zeros(duty.stop - duty.start, dtype=np.uint8)
                    runs = runs_of_duty(file, duty)
                    for start, stop in runs:
                        mine[start - duty.start : stop - duty.start] = content[start:stop]
                    crcs = checksums.of_chunks(mine.ctypes.data, len(mine), 4096)
                    crcs ^= checksums.of_zero_chunks(len(mine), 4096)
                    written.append(
                        tables.Written(
                            file=file.name,
                            start=duty.start,
                            num_bytes=sum(stop - start for start, stop in runs),
                            crcs=tables.pack(crcs),
                        )
                    )
        random.shuffle(written)
        expected = checksums.of_chunks(content.ctypes.data, file.size, 4096)
        assert (tables.join(file.size, 4096, written) == expected).all()


def test_a_part_that_nobody_holds_is_named():
    image = plan_image([Wanted(name="w", dtype="float32", shape=(8,), kind="model")])
    boxes = held_by_all((8,), (2,), [Cut(0)])
    with pytest.raises(NotCovered, match="w: no source process holds the part"):
        plan_shares(image, {"w": {0: [one.box for one in boxes[0]]}}, [0, 1])


def test_replicas_share_the_work_by_whole_tensors():
    wanted = [
        Wanted(name=f"w{place}", dtype="float32", shape=(16, 256), kind="model")
        for place in range(40)
    ]
    image = plan_image(wanted)
    whole = held_by_all((16, 256), (4,), [Cut()])
    boxes = {rank: [one.box for one in own] for rank, own in enumerate(whole)}
    planned = plan_shares(image, {one.name: boxes for one in wanted}, [0, 1, 2, 3])
    (file,) = image.files
    writers: dict[str, set[int]] = {}
    sizes = []
    for rank, duties in planned.items():
        runs = [run for duty in duties for run in runs_of_duty(file, duty)]
        sizes.append(sum(stop - start for start, stop in runs))
        for slot in file.slots:
            if any(start < slot.stop and stop > slot.offset for start, stop in runs):
                writers.setdefault(slot.name, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in writers.values())
    assert max(sizes) - min(sizes) <= 16 * 256 * 4 + BLOCK


@settings(max_examples=30, deadline=None)
@given(worlds())
def test_boxes_in_files_of_their_own_cover_every_element_once(world):
    image, holders, ranks = world
    slots = [slot for file in image.files for slot in file.slots]
    found = shares.plan_boxes([(slot.name, slot.item_bytes) for slot in slots], holders, ranks)
    for slot in slots:
        count = np.zeros(slot.shape, dtype=int)
        for rank in ranks:
            for box in found[rank].get(slot.name, ()):
                held = holders[slot.name][rank]
                assert any(one.intersect(box) == box for one in held)
                count[tuple(map(slice, box.offsets, box.stops))] += 1
        assert (count == 1).all()
