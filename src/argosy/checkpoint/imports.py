"""Checkpoints of other programs as one of ours: Hugging Face directories, torch's distributed checkpoints, files of `torch.save`.

Hugging Face files are streamed block by block. torch's files are read weights-only, its description of a distributed checkpoint without running it:
nothing that a file names is ever imported or called. The result is a committed step like any other.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from argosy.checkpoint import (
    directio,
    headers,
    names,
    pickledvalues,
    records,
    saving,
    tables,
    trees,
)
from argosy.checkpoint.blocks import BlockWriter
from argosy.checkpoint.books import Book
from argosy.checkpoint.commits import Store
from argosy.checkpoint.directio import FILES, disk_error
from argosy.checkpoint.headers import FROM_FILE, Place
from argosy.checkpoint.layouts import Image, Slot, Wanted, plan_image
from argosy.checkpoint.modules import MODEL
from argosy.checkpoint.pickledvalues import Made
from argosy.checkpoint.records import Facts
from argosy.checkpoint.shares import Duty
from argosy.checkpoint.sources import ReadSource
from argosy.checkpoint.together import Settings
from argosy.checkpoint.votes import Common
from argosy.errors import CheckpointDamaged, ConfigError, NotFoundError
from argosy.move.placements import dtype_of

Form = Literal["hf", "dcp", "torch"]
Progress = Callable[[int, int], None]
MOST_ATTACHED_BYTES = 64 << 20
_METADATA = ".metadata"
_WRITERS = 2
_WRAPPINGS = ("module.", "_orig_mod.")
# What torch raises over bytes that are none of its own. The standard library's error of unpickling comes from there: this program imports no such module itself.
_UNREADABLE: tuple[type[Exception], ...] = (
    vars(torch.serialization)["pickle"].UnpicklingError,
    RuntimeError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
)
_COLOURS = re.compile(r"\x1b?\[\d+m")
"""That torch puts into its texts for a terminal."""


def form_of(source: Path) -> Form:
    """What a path holds, by what lies there."""
    if source.is_dir():
        if (source / _METADATA).exists():
            return "dcp"
        if any(source.glob(f"*{names.SUFFIX}")):
            return "hf"
    elif source.is_file():
        return "hf" if source.suffix == names.SUFFIX else "torch"
    raise NotFoundError(
        f"{source} holds no checkpoint that is known",
        fix="give a directory with *.safetensors, one of torch.distributed.checkpoint, or a file of torch.save",
    )


def take_in(
    store: Store, source: Path, step: int, form: Form, *, progress: Progress | None = None
) -> bytes:
    """Make a step of the store from another program's checkpoint; the manifest's bytes. The store must be locked."""
    try:
        if form == "hf":
            return _import_files(store, source, step, progress)
        state = _read_distributed(source) if form == "dcp" else _read_saved(source)
    except OSError as failure:
        raise disk_error(failure, f"{source} cannot be read")
    settings = Settings(files=FILES, threads=_WRITERS)
    return saving.save(store, Facts(step=step), book_of(state), settings)


def _import_files(store: Store, source: Path, step: int, progress: Progress | None) -> bytes:
    files = [source] if source.is_file() else sorted(source.glob(f"*{names.SUFFIX}"))
    opened: list[int] = []
    places: dict[str, tuple[int, Place]] = {}
    try:
        for file in files:
            opened.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            for place in _places_of(opened[-1], file):
                if place.name in places:
                    raise CheckpointDamaged(
                        f"{place.name} is in two files of {source}",
                        fix="leave only the files of one model there",
                    )
                places[place.name] = opened[-1], place
        attachments = {} if source.is_file() else _attachments_in(source)
        return _write_weights(store, Facts(step=step, attachments=attachments), places, progress)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _places_of(descriptor: int, file: Path) -> list[Place]:
    size = os.fstat(descriptor).st_size
    length = headers.header_bytes(os.pread(descriptor, 8, 0), size, str(file))
    header = b""
    while len(header) < length and (
        more := os.pread(descriptor, length - len(header), len(header))
    ):
        header += more
    found, _ = headers.decode(header, size, str(file))
    return found


def _attachments_in(source: Path) -> dict[str, bytes]:
    """Configs and tokenizers beside the weights."""
    found = {}
    for one in sorted(source.iterdir()):
        is_ours = one.name in (names.INDEX, names.VALUES) or not names.is_attachment(one.name)
        is_small = one.is_file() and one.stat().st_size <= MOST_ATTACHED_BYTES
        if is_small and not is_ours and one.suffix not in (".bin", ".pt", ".pth", ".h5"):
            found[one.name] = one.read_bytes()
    return found


def _write_weights(
    store: Store, facts: Facts, places: dict[str, tuple[int, Place]], progress: Progress | None
) -> bytes:
    wanted = tuple(
        Wanted(name=name, dtype=FROM_FILE[place.dtype], shape=place.shape, kind="model")
        for name, (_, place) in places.items()
    )
    image = plan_image(wanted)
    common = Common(wanted=wanted, meanings={}, holders={}, aliases={}, values={})
    duties = [
        Duty(number, start, min(file.size, start + tables.BLOCK_BYTES))
        for number, file in enumerate(image.files)
        for start in range(0, file.size, tables.BLOCK_BYTES)
    ]
    done = 0

    def pace(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, image.num_bytes)

    staging = store.stage(facts.step)
    try:
        directio.check_space(FILES, staging.fd, image.num_bytes, f"step {facts.step}")
        source = FileSource(image, places)
        writer = BlockWriter(staging.fd, image, source, threads=_WRITERS, pace=pace)
        written = writer.write(duties)
        return records.commit(staging, records.outline_of(facts, image, common), written)
    except BaseException:
        staging.abandon()
        raise


class FileSource(ReadSource):
    """A source of the block writer: whole tensors that lie in other files."""

    def __init__(self, image: Image, places: Mapping[str, tuple[int, Place]]) -> None:
        super().__init__(image)
        self._places = places

    def _read(self, slot: Slot, first: int, last: int, address: int) -> None:
        descriptor, place = self._places[slot.name]
        start, size = first * slot.item_bytes, (last - first) * slot.item_bytes
        _read_into(descriptor, place.start + start, address, size, slot.name)


def _read_into(descriptor: int, offset: int, address: int, size: int, name: str) -> None:
    memory = memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if count <= 0:
            raise CheckpointDamaged(f"the file of {name} ends at {offset}", fix="get a whole copy")
        memory, offset = memory[count:], offset + count


def _read_saved(source: Path) -> dict[str, Any]:
    """A file of torch.save, weights only: what holds anything else is refused."""
    found = _load_weights(source, str(source))
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{source} holds a {type(found).__name__}, not a state dict",
            fix="save a dict of tensors, or of state dicts",
        )
    return dict(found)


def _load_weights(source: Any, what: str) -> Any:
    try:
        # Files of the old kind are no archives and cannot be mapped.
        is_mapped = isinstance(source, Path) and zipfile.is_zipfile(source)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
    except _UNREADABLE as failure:
        raise _refused(what, failure)


def _refused(what: str, failure: Exception) -> ConfigError:
    text = _COLOURS.sub("", str(failure))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # What torch says first is how to run whatever the file names; why it did not comes behind it.
    advice = ("weights_only", "Weights only load failed")
    told = [line for line in lines if not (line.startswith("(") or any(a in line for a in advice))]
    first = f"{type(failure).__name__}: {(told or ['unreadable'])[0]}"
    return ConfigError(
        f"{what} cannot be read weights-only: {first[:200]}",
        fix="save it again with tensors, numbers, texts and containers alone",
    )


def _read_distributed(source: Path) -> dict[str, Any]:
    """The state in a directory of torch.distributed.checkpoint, nested as it was."""
    told = pickledvalues.read((source / _METADATA).read_bytes(), f"{source / _METADATA}")
    if not isinstance(told, Made) or told.by.name != "Metadata":
        raise CheckpointDamaged(f"{source / _METADATA} describes no checkpoint")
    where = _storage_of(told.get("storage_data"), source)
    paths = told.get("planner_data") or {}
    found: dict[str, Any] = {}
    for name, described in (told.get("state_dict_metadata") or {}).items():
        if described.by.name == "TensorStorageMetadata":
            value: Any = _joined(name, described, where)
        else:
            value = _load_weights(io.BytesIO(where(name, None)), f"{name} of {source}")
        _put(found, paths.get(name) or (name,), value)
    return {key: _lists_of(one) for key, one in found.items()}


Where = Callable[[str, "tuple[int, ...] | None"], bytes]
"""(name, offsets of a part or None) → its bytes."""


def _storage_of(told: Any, source: Path) -> Where:
    """Where the bytes of each part lie; paths that leave the directory are refused."""
    places: dict[tuple[str, tuple[int, ...] | None], Made] = {}
    for index, info in (told or {}).items():
        offset = index.get("offset")
        key = None if offset is None else _numbers(offset)
        places[index.get("fqn"), key] = info

    def read(name: str, offsets: tuple[int, ...] | None) -> bytes:
        info = places.get((name, offsets))
        if info is None:
            raise CheckpointDamaged(f"{source} does not say where {name} lies")
        if info.get("transform_descriptors"):
            raise ConfigError(f"{name} of {source} is compressed", fix="save it without extensions")
        relative = str(info.get("relative_path"))
        names.check_file(relative.removeprefix("__"), str(source))
        path = source / relative
        with open(path, "rb") as opened:
            opened.seek(int(info.get("offset")))
            return opened.read(int(info.get("length")))

    return read


def _joined(name: str, described: Made, where: Where) -> torch.Tensor:
    """A tensor from its parts; they must cover it."""
    shape = _numbers(described.get("size"))
    dtype = dtype_of(_dtype_name(described.get("properties")))
    parts = described.get("chunks") or []
    found = torch.empty(shape, dtype=dtype)
    covered = 0
    for part in parts:
        offsets, sizes = _numbers(part.get("offsets")), _numbers(part.get("sizes"))
        loaded = _load_weights(io.BytesIO(where(name, offsets)), name)
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != sizes:
            raise CheckpointDamaged(f"a part of {name} is not what its description says")
        if any(
            low + extent > size for low, extent, size in zip(offsets, sizes, shape, strict=True)
        ):
            raise CheckpointDamaged(f"a part of {name} lies outside its shape {shape}")
        found[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = loaded
        covered += math.prod(sizes)
    if covered != math.prod(shape):
        raise CheckpointDamaged(f"the parts of {name} do not cover its shape {shape}")
    return found


def _numbers(value: Any) -> tuple[int, ...]:
    """A torch.Size, as it was pickled."""
    if isinstance(value, Made):
        value = value.arguments[0] if value.arguments else ()
    if not isinstance(value, (tuple, list)) or not all(type(one) is int for one in value):
        raise CheckpointDamaged(f"{value!r} is no shape")
    return tuple(value)


def _dtype_name(properties: Any) -> str:
    state = properties.state if isinstance(properties, Made) else None
    first = state[0] if isinstance(state, tuple) and state else None
    name = first.name if isinstance(first, pickledvalues.Name) else str(first)
    return name.removeprefix("torch.")


def _put(found: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        found = found.setdefault(key, {})
    found[path[-1]] = value


def _lists_of(value: Any) -> Any:
    """Flattened lists come back as mappings of places: make them lists again."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists_of(one) for key, one in value.items()}
    is_list = bool(inner) and all(type(key) is int for key in inner)
    if is_list and sorted(inner) == list(range(len(inner))):
        return [inner[place] for place in range(len(inner))]
    return inner


def book_of(state: Mapping[str, Any]) -> Book:
    """A torch program's state as a book: weights by their own names, optimizers whose parameters have names, and the rest as values."""
    book = Book()
    if all(isinstance(value, torch.Tensor) for value in state.values()):
        state = {MODEL: state}
    weights = next((key for key in _MODEL_KEYS if _is_weights(state.get(key))), None)
    for key, value in state.items():
        if key == weights:
            _add_weights(book, value)
        elif _is_named_optimizer(value):
            _add_optimizer(book, str(key), value)
        else:
            book.values[str(key)] = trees.encode(value, book.store, str(key))
    return book


_MODEL_KEYS = (MODEL, "state_dict", "model_state_dict", "module", "app")


def _is_weights(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, torch.Tensor) for v in value.values())


def _add_weights(book: Book, weights: Mapping[str, Any]) -> None:
    extra: dict[str, Any] = {}
    for name, value in weights.items():
        plain = str(name)
        for wrapping in _WRAPPINGS:
            if all(str(one).startswith(wrapping) for one in weights):
                plain = plain.removeprefix(wrapping)
        if isinstance(value, torch.Tensor):
            book.add(plain, value, "model")
        else:
            extra[plain] = trees.encode(value, book.store, f"{MODEL}/{plain}")
    if extra:
        book.values[MODEL] = extra


def _is_named_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {"state", "param_groups"} <= value.keys():
        return False
    groups = value["param_groups"]
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and all(isinstance(one, str) for one in group.get("params", [0]))
        for group in groups
    )


def _add_optimizer(book: Book, key: str, value: Mapping[str, Any]) -> None:
    groups, numbers, tensors = [], {}, {}
    for place, group in enumerate(value["param_groups"]):
        settings = {
            name: one for name, one in group.items() if name not in ("params", "param_names")
        }
        encoded = trees.encode(settings, book.store, f"{key}/group-{place}")
        groups.append({**encoded, "parameters": list(group["params"])})
    for name, members in value["state"].items():
        kept, plain = [], {}
        for member, one in members.items():
            path = f"{key}/{name}/{member}"
            if isinstance(one, torch.Tensor):
                book.add(path, one, "optimizer")
                kept.append(member)
            else:
                plain[member] = trees.encode(one, book.store, path)
        tensors[name] = kept
        if plain:
            numbers[name] = plain
    book.values[key] = {"groups": groups, "state": numbers, "tensors": tensors}
