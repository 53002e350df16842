"""The image of a checkpoint: which tensor lies in which file at which offset, and each file's header.

Every process computes the same image from the same names, shapes and dtypes; snapshots lay their memory out like it, the writer sends it to disk.
Pure. The order of tensors keeps large ones at multiples of 64 KiB and each at a multiple of its element's size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence

import msgspec

from argosy.checkpoint import headers, names
from argosy.checkpoint.headers import ITEM_BYTES, dtype_in_file
from argosy.checkpoint.names import Kind
from argosy.errors import ConfigError
from argosy.move.boxes import Box

MOST_FILE_BYTES = 4 << 30
_UNITS = (65536, 4096, 64)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that is to be saved: its name, torch's dtype, global shape and class."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor's place in a file; `box` when the file has only this part of it."""

    name: str
    dtype: str
    """The file's word."""
    shape: tuple[int, ...]
    """Of what is in the file: the tensor's, or the box's sizes."""
    offset: int
    num_bytes: int
    box: Box | None = None

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def stop(self) -> int:
        """First byte behind it."""
        return self.offset + self.num_bytes


class FileImage(msgspec.Struct, frozen=True, kw_only=True):
    """One data file."""

    name: str
    kind: Kind
    size: int
    header: bytes
    slots: tuple[Slot, ...]
    """By rising offset; tensors without elements are here too."""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """All data files of a checkpoint."""

    files: tuple[FileImage, ...]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)


def plan_image(wanted: Iterable[Wanted], *, most_bytes: int = MOST_FILE_BYTES) -> Image:
    """Whole tensors, files of one class each, none much larger than `most_bytes` unless a single tensor is."""
    stored = [(one, dtype_in_file(one.dtype, one.name)) for one in wanted]
    seen: set[str] = set()
    for one, _ in stored:
        if one.name in seen or not names.is_tensor_name(one.name):
            raise ConfigError(
                f"the tensor name {one.name!r} "
                + ("is used twice" if one.name in seen else "cannot be used"),
                fix="save the two under different keys" if one.name in seen else "use plain text",
            )
        seen.add(one.name)
    groups: list[tuple[Kind, list[tuple[str, str, tuple[int, ...]]]]] = []
    for kind in names.KINDS:
        own = [(one.name, dtype, one.shape) for one, dtype in stored if one.kind == kind]
        groups += [(kind, group) for group in _split(own, most_bytes)]
    files, numbers = [], _numbers([kind for kind, _ in groups])
    for (kind, group), (number, count) in zip(groups, numbers, strict=True):
        files.append(_file(names.data_file(kind, number, count), kind, group))
    return Image(files=tuple(files))


def plan_shards(wanted: Iterable[tuple[Wanted, Sequence[Box]]], writer: int) -> Image:
    """What one writer puts into files of its own where no file can be shared; a tensor's second box goes into a second file."""
    groups: dict[tuple[Kind, int], list[tuple[str, str, Box]]] = {}
    for one, held in wanted:
        for place, box in enumerate(held):
            dtype = dtype_in_file(one.dtype, one.name)
            groups.setdefault((one.kind, place), []).append((one.name, dtype, box))
    files = []
    for kind, place in sorted(groups, key=lambda key: (names.KINDS.index(key[0]), key[1])):
        own = groups[kind, place]
        count = sum(other == kind for other, _ in groups)
        name = names.data_file(kind, place + 1, count, writer)
        boxes = {key: box for key, _, box in own}
        files.append(_file(name, kind, [(key, dtype, box.sizes) for key, dtype, box in own], boxes))
    return Image(files=tuple(files))


def _split(
    group: list[tuple[str, str, tuple[int, ...]]], most_bytes: int
) -> Iterable[list[tuple[str, str, tuple[int, ...]]]]:
    part: list[tuple[str, str, tuple[int, ...]]] = []
    held = 0
    for one in group:
        size = _num_bytes(one)
        if part and held + size > most_bytes:
            yield part
            part, held = [], 0
        part.append(one)
        held += size
    if part:
        yield part


def _file(
    name: str,
    kind: Kind,
    group: list[tuple[str, str, tuple[int, ...]]],
    boxes: dict[str, Box] | None = None,
) -> FileImage:
    ordered = sorted(group, key=_rank)
    metadata = {"format": "pt"}
    if boxes is not None:
        offsets = {key: {"saved_offsets": list(box.offsets)} for key, box in boxes.items()}
        metadata["DCP_SHARDING_INFO"] = json.dumps(offsets, separators=(",", ":"))
    header, places = headers.encode(ordered, metadata)
    slots = tuple(
        Slot(
            name=place.name,
            dtype=place.dtype,
            shape=place.shape,
            offset=place.start,
            num_bytes=place.stop - place.start,
            box=None if boxes is None else boxes[place.name],
        )
        for place in places
    )
    size = slots[-1].stop if slots else len(header)
    return FileImage(name=name, kind=kind, size=size, header=header, slots=slots)


def _rank(one: tuple[str, str, tuple[int, ...]]) -> tuple[int, int]:
    """Sorting is stable: within a rank tensors keep the order they were given in."""
    size = _num_bytes(one)
    for place, unit in enumerate(_UNITS):
        if size % unit == 0:
            return place, 0
    return len(_UNITS), -ITEM_BYTES[one[1]]


def _num_bytes(one: tuple[str, str, tuple[int, ...]]) -> int:
    return math.prod(one[2]) * ITEM_BYTES[one[1]]


def _numbers(kinds: list[Kind]) -> list[tuple[int, int]]:
    """(number, count) of each file: frozen and model weights are counted together."""
    families = ["model" if kind == "frozen" else kind for kind in kinds]
    return [
        (families[: place + 1].count(family), families.count(family))
        for place, family in enumerate(families)
    ]
