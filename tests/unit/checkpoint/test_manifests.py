"""The manifest: what it says comes back, and whatever lies is refused."""

import base64
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.checkpoint import checksums, manifests, names
from argosy.checkpoint.manifests import FileRecord, Manifest, Origin, Parent, Part, TensorRecord
from argosy.errors import CheckpointDamaged, ConfigError
from argosy.move.boxes import Box

TABLE = base64.b64encode(bytes(4)).decode()


def file(size=12288, kind="model", **more):
    return FileRecord(kind=kind, size=size, chunk_bytes=65536, crc32c=TABLE, **more)


def manifest(**changes):
    base = {
        "step": 7,
        "run": "r-1",
        "saved_at": 1.5,
        "writer": "argosy 0.1.0",
        "parent": Parent(step=6, crc32c=5),
        "metrics": {"loss": 0.25},
        "files": {"model-00001-of-00001.safetensors": file(), "extra.json": file(20, "extra")},
        "tensors": {
            "w": TensorRecord(
                kind="model",
                dtype="F32",
                shape=(32, 64),
                parts=(Part(file="model-00001-of-00001.safetensors", offset=4096),),
            )
        },
        "aliases": {"tied": "w"},
        "values": "extra.json",
    }
    return Manifest(**(base | changes))


def tensor(shape=(32, 64), dtype="F32", kind="model", parts=None, **more):
    whole = (Part(file="model-00001-of-00001.safetensors", offset=4096),)
    parts = whole if parts is None else parts
    return TensorRecord(kind=kind, dtype=dtype, shape=shape, parts=parts, **more)


def part(offset=4096, box=None, name="model-00001-of-00001.safetensors"):
    return Part(file=name, offset=offset, box=box)


def test_what_is_encoded_is_decoded():
    data = manifests.encode(manifest())
    assert manifests.decode(data) == manifest()
    assert json.loads(data)["crc32c"] == manifests.crc_of(data)
    assert data.endswith(b"}\n")


def test_keys_stand_in_the_order_of_the_format():
    keys = list(json.loads(manifests.encode(manifest())))
    first = ["format", "version", "requires", "step", "run", "saved_at", "writer", "parent"]
    assert keys == [*first, "world", "metrics", "files", "tensors", "aliases", "values", "crc32c"]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_changed_byte_goes_unnoticed(data):
    encoded = bytearray(manifests.encode(manifest()))
    place = data.draw(st.integers(0, len(encoded) - 2))  # the last newline may go
    encoded[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((CheckpointDamaged, ConfigError)):
        manifests.decode(bytes(encoded))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.binary(max_size=40))
def test_no_cut_or_lengthened_manifest_is_read(cut, tail):
    encoded = manifests.encode(manifest())
    changed = encoded[: len(encoded) - 2 - cut % len(encoded)] + tail
    if changed.rstrip(b"\n") != encoded.rstrip(b"\n"):
        with pytest.raises((CheckpointDamaged, ConfigError)):
            manifests.decode(changed)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_no_manifest(noise):
    with pytest.raises(CheckpointDamaged):
        manifests.decode(noise)


LIES = {
    "a file outside": {"files": {"../x.safetensors": file()}, "tensors": {}, "values": None},
    "a hidden file": {"files": {".x": file()}, "tensors": {}, "values": None},
    "itself as a file": {"files": {"MANIFEST.json": file()}, "tensors": {}, "values": None},
    "an origin outside": {
        "files": {"a": file(origin=Origin(step=1, file="../b"))},
        "tensors": {},
        "values": None,
    },
    "an origin in the future": {
        "files": {"a": file(origin=Origin(step=8, file="b"))},
        "tensors": {},
        "values": None,
    },
    "a reference to nowhere": {
        "files": {"a": file(stored="origin")},
        "tensors": {},
        "values": None,
    },
    "a short table": {"files": {"a": file(65537)}, "tensors": {}, "values": None},
    "a negative size": {"files": {"a": file(-1)}, "tensors": {}, "values": None},
    "an odd chunk": {
        "files": {"a": msgspec.structs.replace(file(), chunk_bytes=5000)},
        "tensors": {},
        "values": None,
    },
    "a part beyond the file": {"tensors": {"w": tensor(parts=(part(8192),))}},
    "a part in the length": {"tensors": {"w": tensor(shape=(2,), parts=(part(4),))}},
    "a part of no file": {"tensors": {"w": tensor(parts=(part(name="other"),))}},
    "a part of another class": {"tensors": {"w": tensor(kind="optimizer")}},
    "a larger shape": {"tensors": {"w": tensor(shape=(33, 64))}},
    "a huge shape": {"tensors": {"w": tensor(shape=(1 << 40, 1 << 40))}},
    "a negative shape": {"tensors": {"w": tensor(shape=(-32, -64))}},
    "an unknown dtype": {"tensors": {"w": tensor(dtype="F31")}},
    "too many dims": {"tensors": {"w": tensor(shape=(1,) * 17)}},
    "a name with a newline": {"tensors": {"w\n": tensor()}},
    "a box outside": {"tensors": {"w": tensor(parts=(part(box=Box((1, 0), (32, 64))),))}},
    "a box of other dims": {"tensors": {"w": tensor(parts=(part(box=Box((0,), (2048,))),))}},
    "half a tensor": {"tensors": {"w": tensor(parts=(part(box=Box((0, 0), (16, 64))),))}},
    "a part twice": {
        "tensors": {
            "w": tensor(
                parts=(
                    part(4096, Box((0, 0), (16, 64))),
                    part(8192, Box((0, 0), (16, 64))),
                )
            )
        }
    },
    "two tensors in one place": {
        "tensors": {"w": tensor(), "v": tensor(shape=(4,))},
        "aliases": {},
    },
    "an element across its own size": {"tensors": {"w": tensor(shape=(4,), parts=(part(4098),))}},
    "an alias of nothing": {"aliases": {"tied": "x"}},
    "an alias that is a tensor": {"aliases": {"w": "w"}},
    "values of no file": {"values": "other.json"},
    "a negative step": {"step": -1},
    "complex of the wrong shape": {"tensors": {"w": tensor(dtype="F32", meaning="complex128")}},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused_though_its_checksum_is_right(lie):
    data = manifests.encode(manifest(**LIES[lie]))
    with pytest.raises(CheckpointDamaged) as caught:
        manifests.decode(data, "step-000000007")
    assert "step-000000007" in caught.value.what or "x" in caught.value.what


def test_the_tensors_of_a_manifest_that_is_known_are_not_looked_at_again():
    data = manifests.encode(manifest(tensors={"w": tensor(shape=(99, 99))}))
    crc = manifests.crc_of(data)
    assert manifests.decode(data, known_crc=crc).tensors["w"].shape == (99, 99)
    for other in (None, crc ^ 1):
        with pytest.raises(CheckpointDamaged):
            manifests.decode(data, known_crc=other)
    outside = {"../extra.json": file(20, "extra")}
    data = manifests.encode(manifest(files=outside, tensors={}, aliases={}, values=None))
    with pytest.raises(CheckpointDamaged):
        manifests.decode(data, known_crc=manifests.crc_of(data))


def test_parts_that_tile_a_tensor_are_accepted():
    boxes = [Box((0, 0), (32, 16)), Box((0, 16), (16, 48)), Box((16, 16), (16, 48))]
    offsets = [4096, 4096 + 2048, 4096 + 2048 + 3072]
    parts = tuple(part(at, box) for at, box in zip(offsets, boxes, strict=True))
    decoded = manifests.decode(manifests.encode(manifest(tensors={"w": tensor(parts=parts)})))
    assert [decoded.tensors["w"].box_of(one) for one in decoded.tensors["w"].parts] == boxes


def rewritten(**changes):
    record = json.loads(manifests.encode(manifest()))
    record.pop("crc32c")
    record |= changes
    body = json.dumps(record, separators=(",", ":")).encode()[:-1]
    return body + b',"crc32c":%d}\n' % checksums.of_bytes(body)


def test_a_newer_version_is_refused_with_the_program_that_wrote_it():
    with pytest.raises(ConfigError, match="version 2") as caught:
        manifests.decode(rewritten(version=2, writer="argosy 9.0"))
    assert "argosy 9.0" in caught.value.fix


def test_an_unknown_requirement_is_refused_and_an_unknown_key_is_not():
    with pytest.raises(ConfigError, match="delta"):
        manifests.decode(rewritten(requires=["delta"]))
    assert manifests.decode(rewritten(later={"a": [1]})).step == 7


def test_more_than_the_limit_is_not_even_parsed(monkeypatch):
    monkeypatch.setattr(names, "MOST_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointDamaged, match="more than 100"):
        manifests.decode(manifests.encode(manifest()))
    monkeypatch.undo()
    monkeypatch.setattr(names, "MOST_TENSORS", 0)
    with pytest.raises(CheckpointDamaged, match="more than allowed"):
        manifests.decode(manifests.encode(manifest()))


def test_nesting_without_end_is_refused():
    with pytest.raises(CheckpointDamaged):
        manifests.decode(b'{"format":' + b"[" * 100_000)
