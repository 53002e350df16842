"""Headers of safetensors files: written so that data begins at a multiple of 4096, read with suspicion.

Dtypes are translated here between torch's names and the file's. Pure; used by layouts.py and by whoever checks or imports a file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from argosy.checkpoint import names
from argosy.errors import CheckpointDamaged, ConfigError
from argosy.move.dtypes import itemsize

ALIGNMENT = 4096
CHUNK_ALIGNMENT = 65536
"""Where data of large files begins: their tensors then begin with a chunk, and a shard is whole chunks."""
_LARGE_FILE = 1 << 20
_LENGTH = struct.Struct("<Q")

TO_FILE = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""torch's name → the file's."""
FROM_FILE = {file: torch for torch, file in TO_FILE.items()}
ITEM_BYTES = {file: itemsize(dtype) for file, dtype in FROM_FILE.items()}
"""By the file's name."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a file: its bytes are [start, stop) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def dtype_in_file(dtype: str, name: str) -> str:
    """The file's word for torch's dtype."""
    if dtype not in TO_FILE:
        raise ConfigError(
            f"{name} has dtype {dtype}, which safetensors files cannot hold",
            fix="save it as another dtype, or view it as uint8",
        )
    return TO_FILE[dtype]


def encode(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[Place]]:
    """The padded header of tensors (name, file dtype, shape) that follow each other, and their places."""
    record: dict[str, Any] = {"__metadata__": dict(metadata)}
    relative, at = [], 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * ITEM_BYTES[dtype]
        record[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        relative.append((name, dtype, shape, at, at + size))
        at += size
    body = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()
    unit = ALIGNMENT if at < _LARGE_FILE else CHUNK_ALIGNMENT
    start = -(-(_LENGTH.size + len(body)) // unit) * unit
    if start - _LENGTH.size > names.MOST_HEADER_BYTES:
        raise ConfigError(
            f"a header of {start} bytes for {len(relative)} tensors is more than readers accept",
            fix="use smaller files",
        )
    header = _LENGTH.pack(start - _LENGTH.size) + body.ljust(start - _LENGTH.size)
    places = [
        Place(name=name, dtype=dtype, shape=shape, start=start + low, stop=start + high)
        for name, dtype, shape, low, high in relative
    ]
    return header, places


def header_bytes(beginning: bytes, size: int, what: str) -> int:
    """Where data begins, from the first eight bytes of a file of this size."""
    if len(beginning) >= _LENGTH.size:
        length = int(_LENGTH.unpack_from(beginning)[0])
        if length <= min(names.MOST_HEADER_BYTES, size - _LENGTH.size):
            return _LENGTH.size + length
    raise CheckpointDamaged(f"{what} is no safetensors file", fix="use another checkpoint")


def decode(header: bytes, size: int, what: str) -> tuple[list[Place], dict[str, str]]:
    """Places and metadata from a whole header; refuses what lies about sizes, offsets or names."""
    start = header_bytes(header, size, what)
    record = _parse(header[_LENGTH.size : start], what)
    metadata = record.pop("__metadata__", {})
    places = [_place(name, entry, start, size, what) for name, entry in record.items()]
    at = start
    for place in sorted(places, key=lambda one: (one.start, one.stop)):
        if place.start != at:
            raise _lie(what, f"{place.name} begins at {place.start}, not at {at}")
        at = place.stop
    if at != size:
        raise _lie(what, f"tensors end at {at}, the file at {size}")
    if not isinstance(metadata, dict):
        raise _lie(what, "metadata is no object")
    return places, {str(key): str(value) for key, value in metadata.items()}


def _parse(body: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise _lie(what, "a name occurs twice in its header")
        return found

    try:
        record = json.loads(body.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise _lie(what, "its header is no JSON object")
    return record


def _place(name: str, entry: Any, start: int, size: int, what: str) -> Place:
    try:
        dtype, shape, (low, high) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, low, high)
        is_sound = (
            names.is_tensor_name(name)
            and dtype in ITEM_BYTES
            and len(shape) <= names.MOST_DIMS
            and all(type(number) is int and 0 <= number <= names.LARGEST for number in numbers)
            and high - low == math.prod(shape) * ITEM_BYTES[dtype]
            and low <= high <= size - start
        )
    except (TypeError, KeyError, ValueError):
        is_sound = False
    if not is_sound:
        raise _lie(what, f"the entry of {name!r} cannot be true")
    return Place(name=name, dtype=dtype, shape=shape, start=start + low, stop=start + high)


def _lie(what: str, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{what}: {why}", fix="use another checkpoint")
