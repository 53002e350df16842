"""The manifest: what a checkpoint holds, where, and the checksum of every chunk; the record whose presence is the commit.

`encode` and `decode` are the bytes of MANIFEST.json, `validate` refuses one that lies about sizes, offsets or names. Pure; the format is
described in docs/reference/checkpoint-format.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import msgspec

from argosy.checkpoint import bands, checksums, names, tables
from argosy.checkpoint.bands import Bands
from argosy.checkpoint.headers import ITEM_BYTES
from argosy.checkpoint.names import Kind
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError
from argosy.move.boxes import Box

_TAIL = re.compile(rb',"crc32c":(\d{1,10})\}\n\Z')
_STORED = ("here", "origin")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The file of an earlier checkpoint whose bytes these are."""

    step: int
    file: str


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file: its class, its size and its chunks' checksums."""

    kind: Kind = msgspec.field(name="class")
    size: int
    chunk_bytes: int
    crc32c: str
    sha256: str | None = None
    origin: Origin | None = None
    stored: str = "here"


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes of a tensor: of the whole of it, or of a box."""

    file: str
    offset: int
    box: Box | None = None
    bands: Bands | None = None


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor: what it is and where its parts lie."""

    kind: Kind = msgspec.field(name="class")
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    meaning: str | None = msgspec.field(name="as", default=None)

    @property
    def num_bytes(self) -> int:
        """Of all its elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def box_of(self, part: Part) -> Box:
        """The part's box, spelled out."""
        return part.box or Box((0,) * len(self.shape), self.shape)

    def bytes_of(self, part: Part) -> int:
        """Bytes of a part."""
        return self.box_of(part).volume * ITEM_BYTES[self.dtype]


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that the run saved before."""

    step: int
    crc32c: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that MANIFEST.json says, but its own checksum."""

    format: str = names.FORMAT
    version: int = names.VERSION
    requires: tuple[str, ...] = ()
    step: int
    run: str = ""
    saved_at: float = 0.0
    writer: str = ""
    parent: Parent | None = None
    world: dict[str, int] = {}
    metrics: dict[str, float | None] = {}
    """None for what was not finite."""
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    aliases: dict[str, str] = {}
    values: str | None = None


class _Preface(msgspec.Struct):
    format: str = ""
    version: int = 0
    requires: list[str] = []
    writer: str = ""


# Made here: what a type is made of is looked up at its first use, which two threads must not do at once.
_MANIFEST, _PREFACE = msgspec.json.Decoder(Manifest), msgspec.json.Decoder(_Preface)


def encode(manifest: Manifest) -> bytes:
    """The bytes of MANIFEST.json."""
    body = msgspec.json.encode(manifest)[:-1]
    return body + b',"crc32c":%d}\n' % checksums.of_bytes(body)


def crc_of(data: bytes) -> int:
    """The manifest's own checksum, by which a successor names it."""
    found = _TAIL.search(data)
    return int(found[1]) if found else 0


def decode(data: bytes, what: str = "the manifest", *, known_crc: int | None = None) -> Manifest:
    """Read and validate; `what` names it in errors. ConfigError for a newer format, CheckpointDamaged for all else.

    The tensors of one that is known by its checksum were looked at before: to do so again would be a good part of a save.
    """
    if len(data) > names.MOST_MANIFEST_BYTES:
        raise _damaged(what, f"has {len(data)} bytes, more than {names.MOST_MANIFEST_BYTES}")
    tail = _TAIL.search(data, max(0, len(data) - 32))
    body = data[: tail.start()] if tail else data
    is_whole = tail is not None and checksums.of_bytes(body) == int(tail[1])
    _check_preface(data, what, is_whole)
    try:
        manifest = _MANIFEST.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise _damaged(what, f"cannot be read: {failure}")
    validate(manifest, what, is_known=tail is not None and int(tail[1]) == known_crc)
    return manifest


def _check_preface(data: bytes, what: str, is_whole: bool) -> None:
    try:
        preface = _PREFACE.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        preface = _Preface()
    if preface.format == names.FORMAT and (preface.version > names.VERSION or preface.requires):
        if preface.requires == [names.ENCRYPTED] and preface.version <= names.VERSION:
            raise ConfigError(
                f"{what} is encrypted",
                fix="give its address and key: argosy checkpoint pull file:///DIRECTORY STORE --secret FILE",
            )
        needs = f"version {preface.version}" + "".join(f", {one!r}" for one in preface.requires)
        raise ConfigError(
            f"{what} has the format {needs}; this program reads version {names.VERSION}",
            fix=f"read it with the program that wrote it or a newer one ({preface.writer or 'unknown'})",
        )
    if not is_whole:
        raise _damaged(
            f"{names.MANIFEST} of {what}", "does not have the checksum it was written with"
        )
    if preface.format != names.FORMAT or preface.version < 1:
        raise _damaged(what, f"is no manifest of a checkpoint ({preface.format!r})")


def validate(manifest: Manifest, what: str = "the manifest", *, is_known: bool = False) -> None:
    """Refuse whatever cannot be true; after this all numbers may be relied on. Of one that is known, files alone are looked at."""
    counts = (len(manifest.files), len(manifest.tensors))
    num_parts = sum(len(record.parts) for record in manifest.tensors.values())
    if counts[0] > names.MOST_FILES or counts[1] > names.MOST_TENSORS:
        raise _damaged(what, f"names {counts[0]} files and {counts[1]} tensors: more than allowed")
    if num_parts > names.MOST_PARTS:
        raise _damaged(what, f"has {num_parts} parts, more than {names.MOST_PARTS}")
    if not 0 <= manifest.step <= names.LARGEST:
        raise _damaged(what, f"has the step {manifest.step}")
    for name, file in manifest.files.items():
        _check_file(manifest, name, file, what)
    if is_known:
        return
    for name, tensor in manifest.tensors.items():
        _check_tensor(manifest, name, tensor, what)
    _check_overlaps(manifest, what)
    for name, target in manifest.aliases.items():
        is_sound = names.is_tensor_name(name) and name not in manifest.tensors
        if not is_sound or target not in manifest.tensors:
            raise _damaged(what, f"has the alias {name!r} of {target!r}")
    if manifest.values is not None and manifest.values not in manifest.files:
        raise _damaged(what, f"has its values in {manifest.values!r}, which is no file of it")


def _check_file(manifest: Manifest, name: str, file: FileRecord, what: str) -> None:
    names.check_file(name, what)
    chunk = file.chunk_bytes
    is_sound = (
        0 <= file.size <= names.LARGEST
        and tables.SMALLEST_CHUNK <= chunk <= tables.BLOCK_BYTES
        and chunk & (chunk - 1) == 0
        and file.stored in _STORED
        and name not in (names.MANIFEST, names.SIGNATURE)
    )
    if is_sound and file.origin is not None:
        names.check_file(file.origin.file, what)
        is_sound = 0 <= file.origin.step <= manifest.step
    if not is_sound or (file.stored == "origin" and file.origin is None):
        raise _damaged(what, f"has an impossible record of {name}")
    found = len(tables.unpack(file.crc32c, name))
    wanted = tables.num_chunks(file.size, chunk)
    if found != wanted:
        raise _damaged(what, f"has {found} checksums of {name}, {wanted} are needed")


def _check_tensor(manifest: Manifest, name: str, tensor: TensorRecord, what: str) -> None:
    shape = tensor.shape
    is_sound = (
        names.is_tensor_name(name)
        and tensor.dtype in ITEM_BYTES
        and tensor.meaning in (None, "complex128")
        and len(shape) <= names.MOST_DIMS
        and all(0 <= size <= names.LARGEST for size in shape)
    )
    if is_sound and tensor.meaning is not None:
        is_sound = tensor.dtype == "F64" and shape[-1:] == (2,)
    if not is_sound or tensor.num_bytes > names.LARGEST:
        raise _damaged(what, f"has an impossible record of the tensor {name!r}")
    for part in tensor.parts:
        file = manifest.files.get(part.file)
        if file is None or file.kind != tensor.kind:
            raise _damaged(what, f"has a part of {name} in {part.file!r}, which is no such file")
        if not _is_inside(tensor.box_of(part), shape):
            raise _damaged(what, f"has the part {part.box} of {name}, whose shape is {shape}")
        is_aligned = part.offset % ITEM_BYTES[tensor.dtype] == 0
        if not is_aligned or not 8 <= part.offset <= file.size - tensor.bytes_of(part):
            raise _damaged(
                what, f"puts a part of {name} at {part.offset}, where it cannot lie in {part.file}"
            )
        if part.bands is not None:
            sizes = tensor.box_of(part).sizes
            bands.stored_grid(sizes, ITEM_BYTES[tensor.dtype], part.bands, f"{what}: {name}")
    covered = sum(tensor.box_of(part).volume for part in tensor.parts)
    if covered != math.prod(shape) or not _are_disjoint(tensor.box_of(p) for p in tensor.parts):
        raise _damaged(what, f"has parts of {name} that do not cover its shape {shape} once")


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        low >= 0 and extent >= 0 and low + extent <= size
        for low, extent, size in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _are_disjoint(boxes: Iterable[Box]) -> bool:
    """Sorted by the first dim, so that each is compared only with those that may still reach it."""
    active: list[Box] = []
    for box in sorted((one for one in boxes if one.volume), key=lambda one: one.offsets):
        active = [one for one in active if not one.sizes or one.stops[0] > box.offsets[0]]
        if any(one.intersect(box) for one in active):
            return False
        active.append(box)
    return True


def _check_overlaps(manifest: Manifest, what: str) -> None:
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for name, tensor in manifest.tensors.items():
        for part in tensor.parts:
            size = tensor.bytes_of(part)
            if size:
                spans.setdefault(part.file, []).append((part.offset, part.offset + size, name))
    for file, found in spans.items():
        reached, before = 0, ""
        for start, stop, name in sorted(found):
            if start < reached:
                raise _damaged(what, f"puts {before} and {name} into the same bytes of {file}")
            reached, before = stop, name


def _damaged(what: str, why: str) -> ArgosyError:
    return CheckpointDamaged(f"{what} {why}", fix="use another checkpoint")
