"""The image of a checkpoint: what goes where, aligned for direct writes."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import headers, layouts
from argosy.checkpoint.layouts import Wanted, plan_image, plan_shards
from argosy.errors import CheckpointDamaged, ConfigError
from argosy.move.boxes import Box

DTYPES = sorted(headers.TO_FILE)
TENSORS = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.lists(st.sampled_from([0, 1, 2, 3, 16, 64, 256]), max_size=3).map(tuple),
        st.sampled_from(["frozen", "model", "optimizer", "extra"]),
    ),
    max_size=12,
)


def wanted(tensors):
    return [
        Wanted(name=f"t{place}", dtype=dtype, shape=shape, kind=kind)
        for place, (dtype, shape, kind) in enumerate(tensors)
    ]


@settings(max_examples=20, deadline=None)
@given(TENSORS, st.sampled_from([1 << 12, 1 << 20, 1 << 32]))
def test_every_tensor_has_one_place_aligned_to_its_elements(tensors, most):
    image = plan_image(wanted(tensors), most_bytes=most)
    slots = {slot.name: (file, slot) for file in image.files for slot in file.slots}
    assert sorted(slots) == sorted(one.name for one in wanted(tensors))
    for one in wanted(tensors):
        file, slot = slots[one.name]
        assert file.kind == one.kind
        assert slot.num_bytes == math.prod(one.shape) * slot.item_bytes
        assert slot.offset % slot.item_bytes == 0
    for file in image.files:
        assert len(file.header) % 4096 == 0
        places, metadata = headers.decode(file.header, file.size, file.name)
        assert metadata == {"format": "pt"}
        assert [(p.name, p.start, p.stop) for p in places] == [
            (s.name, s.offset, s.stop) for s in file.slots
        ]


def test_large_tensors_come_first_and_begin_at_whole_chunks():
    tensors = [("float32", (3,), "model"), ("float32", (256, 256), "model")] * 3
    (file,) = plan_image(wanted(tensors)).files
    assert [slot.offset % 4096 for slot in file.slots[:3]] == [0, 0, 0]
    assert [slot.num_bytes for slot in file.slots] == [262144] * 3 + [12] * 3


def test_classes_have_files_of_their_own_and_weights_share_one_count():
    tensors = [("float32", (4,), kind) for kind in ("extra", "model", "frozen", "optimizer")]
    assert [(file.name, file.kind) for file in plan_image(wanted(tensors)).files] == [
        ("model-00001-of-00002.safetensors", "frozen"),
        ("model-00002-of-00002.safetensors", "model"),
        ("optimizer-00001-of-00001.safetensors", "optimizer"),
        ("extra-00001-of-00001.safetensors", "extra"),
    ]


def test_a_name_twice_and_an_unsuitable_one_are_refused():
    one = Wanted(name="a", dtype="float32", shape=(1,), kind="model")
    with pytest.raises(ConfigError, match="'a' is used twice"):
        plan_image([one, one])
    with pytest.raises(ConfigError, match="cannot be used"):
        plan_image([Wanted(name="a\n", dtype="float32", shape=(1,), kind="model")])
    with pytest.raises(ConfigError, match="qint8"):
        plan_image([Wanted(name="a", dtype="qint8", shape=(1,), kind="model")])


def test_shards_carry_their_offsets_as_torch_writes_them():
    one = Wanted(name="w", dtype="float32", shape=(8, 4), kind="model")
    held = [Box((0, 0), (2, 4)), Box((4, 0), (2, 4))]
    image = plan_shards([(one, held)], writer=3)
    assert [file.name for file in image.files] == [
        "shard-00003-model-00001-of-00002.safetensors",
        "shard-00003-model-00002-of-00002.safetensors",
    ]
    for file, box in zip(image.files, held, strict=True):
        _, metadata = headers.decode(file.header, file.size, file.name)
        assert metadata["DCP_SHARDING_INFO"] == json.dumps(
            {"w": {"saved_offsets": box.offsets}}, separators=(",", ":")
        )
        assert file.slots[0].box == box


HEADER, _ = headers.encode([("a", "F32", (2, 2)), ("b", "U8", (3,))], {})
SIZE = len(HEADER) + 19


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_changed_header_is_refused_or_says_the_same_or_names_other_things(data):
    """Only checksums can find a changed letter in a name; offsets and sizes can never lead out of the file."""
    changed = bytearray(HEADER)
    place = data.draw(st.integers(0, 200))
    changed[place] = data.draw(st.integers(0, 255))
    try:
        places, _ = headers.decode(bytes(changed), SIZE, "x")
    except CheckpointDamaged:
        return
    assert all(len(HEADER) <= p.start <= p.stop <= SIZE for p in places)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,15]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[4,20]}}',
        b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[true,4],"data_offsets":[0,16]}}',
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16,3]}}',
        b'{"a":7}',
        b"[1]",
        b"{" * 50000,
    ],
)
def test_headers_that_cannot_be_true_are_refused(body):
    header = len(body).to_bytes(8, "little") + body
    with pytest.raises(CheckpointDamaged):
        headers.decode(header, len(header) + 16, "x")


def test_a_length_beyond_the_file_is_refused_before_it_is_read():
    with pytest.raises(CheckpointDamaged):
        headers.header_bytes((1 << 60).to_bytes(8, "little"), 1 << 62, "x")
    with pytest.raises(CheckpointDamaged):
        headers.header_bytes(b"abc", 3, "x")


def test_the_image_counts_its_bytes():
    image = plan_image(wanted([("float32", (1024,), "model")]))
    assert image.num_bytes == 4096 + 4096
    assert layouts.plan_image([]).num_bytes == 0
