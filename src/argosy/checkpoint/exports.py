"""A checkpoint for other programs: a Hugging Face directory, torch's distributed checkpoint, or a file of `torch.save`.

The Hugging Face directory is streamed: blocks are read, checked, cast if asked, and written, whatever the size of the model. The other two are made
by torch and take the memory that torch takes. The result appears by rename when it is whole and flushed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from argosy.checkpoint import directio, fetches, names, reads, tables
from argosy.checkpoint.blocks import BlockWriter
from argosy.checkpoint.directio import FILES
from argosy.checkpoint.gathering import tensor_at
from argosy.checkpoint.headers import FROM_FILE
from argosy.checkpoint.layouts import Image, Slot, Wanted, plan_image
from argosy.checkpoint.modules import MODEL
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.ranges import boxes_of_range, flat_offset
from argosy.checkpoint.registry import STREAMS
from argosy.checkpoint.shares import Duty
from argosy.checkpoint.sources import ReadSource
from argosy.errors import ConfigError, NotFoundError
from argosy.move.boxes import Held, row_major
from argosy.move.dtypes import can_cast
from argosy.move.placements import dtype_of

Form = Literal["hf", "dcp", "torch"]
Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""
_WRITERS = 2
_SINGLE = "model.safetensors"


def export(
    opened: Opened,
    out: Path,
    form: Form = "hf",
    *,
    key: str = MODEL,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> int:
    """Write a checkpoint elsewhere in another form; bytes written. Never replaces anything."""
    if form == "hf":
        return _export_directory(opened, out, key, dtype, progress)
    if dtype is not None or key != MODEL:
        raise ConfigError(
            f"a {form} export is the whole state as it is", fix="leave --dtype and --key out"
        )
    with _appearing(out) as beside:
        if form == "dcp":
            writer = FileSystemWriter(str(beside), single_file_per_rank=True, sync_files=True)
            save_distributed(torch_state(opened), storage_writer=writer, no_dist=True)
        else:
            with open(beside, "wb") as file:
                torch.save(torch_state(opened), file)
                file.flush()
                os.fsync(file.fileno())
        return _size_of(beside)


def _export_directory(
    opened: Opened, out: Path, key: str, dtype: str | None, progress: Progress | None
) -> int:
    stored = weights_of(opened, key)
    wanted = [_wanted(opened, name, stored[name], dtype) for name in stored]
    image = _named_as_usual(plan_image(wanted))
    source = StoredSource(image, opened, stored)
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

    with _appearing(out) as beside:
        beside.mkdir()
        directory = os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            directio.check_space(FILES, directory, image.num_bytes, f"the export to {out}")
            with opened.naming_tensors():
                BlockWriter(directory, image, source, threads=_WRITERS, pace=pace).write(duties)
            _write_beside(opened, image, beside)
            os.fsync(directory)
        finally:
            os.close(directory)
        return _size_of(beside)


def weights_of(opened: Opened, key: str) -> dict[str, str]:
    """Plain name → name in the checkpoint, of the weights of one module."""
    prefix = "" if key == MODEL else f"{key}/"
    found = {}
    for name, record in opened.manifest.tensors.items():
        is_weight = record.kind in ("frozen", "model") and record.meaning is None
        if is_weight and name.startswith(prefix) and "/" not in name[len(prefix) :]:
            found[name[len(prefix) :]] = name
    if not found:
        raise NotFoundError(
            f"{opened.path.name} has no weights under {key!r}",
            fix="name the key under which the module was saved: --key KEY",
        )
    return found


def _wanted(opened: Opened, name: str, stored: str, dtype: str | None) -> Wanted:
    record = opened.record(stored)
    given = FROM_FILE[record.dtype]
    if dtype is not None and dtype_of(given).is_floating_point:
        if not can_cast(given, dtype):
            raise ConfigError(
                f"{name} is {given}, which cannot become {dtype}", fix="leave --dtype out"
            )
        given = dtype
    return Wanted(name=name, dtype=given, shape=record.shape, kind="model")


def _named_as_usual(image: Image) -> Image:
    """A single file has no numbers."""
    if len(image.files) != 1:
        return image
    return Image(files=(msgspec.structs.replace(image.files[0], name=_SINGLE),))


def _write_beside(opened: Opened, image: Image, directory: Path) -> None:
    """The index, and the small files that were saved with the model."""
    if len(image.files) > 1:
        where = {slot.name: file.name for file in image.files for slot in file.slots}
        total = sum(slot.num_bytes for file in image.files for slot in file.slots)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        _put(directory / names.INDEX, json.dumps(index, indent=1, ensure_ascii=False).encode())
    for name in opened.manifest.files:
        if names.is_attachment(name) and name not in (names.INDEX, names.VALUES):
            stored = opened.stored(name)
            _put(directory / name, fetches.read_bytes(stored, 0, stored.size, files=opened.files))


class StoredSource(ReadSource):
    """A source of the block writer that reads, checks and casts from a checkpoint as blocks are asked for."""

    def __init__(self, image: Image, opened: Opened, stored: dict[str, str]) -> None:
        super().__init__(image)
        self._opened = opened
        self._stored = stored
        # Opened before the writing threads begin: opening is not made for several at once.
        for file in {p.file for n in stored.values() for p in opened.record(n).parts}:
            opened.stored(file)

    def _read(self, slot: Slot, first: int, last: int, address: int) -> None:
        flat = tensor_at(address, (last - first,), (1,), dtype_of(FROM_FILE[slot.dtype]))
        work: dict[str, list[reads.Request]] = {}
        for box in boxes_of_range(slot.shape, first, last):
            start = flat_offset(slot.shape, box.offsets) - first
            held = Held(box, start, row_major(slot.shape))
            for file, request in self._opened.requests(self._stored[slot.name], held, flat):
                work.setdefault(file, []).append(request)
        jobs = [(self._opened.stored(file), wanted) for file, wanted in work.items()]
        reads.read(jobs, threads=1, files=self._opened.files)


def torch_state(opened: Opened) -> dict[str, Any]:
    """The whole state as torch programs keep it; optimizers by the parameters' names, as `torch.distributed.checkpoint` has them."""
    manifest = opened.manifest
    trees = opened.trees()
    found: dict[str, Any] = {}
    read: dict[str, torch.Tensor] = {}
    for name, target in [(n, n) for n in manifest.tensors] + list(manifest.aliases.items()):
        if manifest.tensors[target].kind not in ("frozen", "model"):
            continue
        key, slash, rest = name.partition("/")
        if target not in read:
            read[target] = opened.tensor(target).read()
        found.setdefault(key if slash else MODEL, {})[rest if slash else name] = read[target]
    for key, tree in trees.items():
        if key == STREAMS:
            continue
        value = opened.value(key)
        if isinstance(tree, dict) and tree.keys() == {"groups", "state", "tensors"}:
            found[key] = _torch_optimizer(opened, key, value)
        elif key in found and isinstance(value, dict):
            found[key] |= value
        else:
            found[key] = value
    return found


def _torch_optimizer(opened: Opened, key: str, value: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    for name, members in value["tensors"].items():
        own = state.setdefault(name, {})
        for member in members:
            own[member] = opened.tensor(f"{key}/{name}/{member}").read()
    for name, plain in value["state"].items():
        state.setdefault(name, {}).update(plain)
    groups = [
        {
            **{setting: one for setting, one in group.items() if setting != "parameters"},
            "params": list(group["parameters"]),
        }
        for group in value["groups"]
    ]
    return {"state": state, "param_groups": groups}


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A path beside the wanted one; renamed when all went well, removed otherwise."""
    if out.exists():
        raise ConfigError(f"{out} exists and is not replaced", fix="choose another path")
    beside = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        os.rename(beside, out)
        descriptor = os.open(out.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as failure:
        _discard(beside)
        raise directio.disk_error(failure, f"{out} cannot be written")
    except BaseException:
        _discard(beside)
        raise


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _put(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
