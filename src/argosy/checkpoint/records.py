"""The commit record of a save: from what was written to the manifest, the index and the values, and the commit itself.

Saves of this process and the writer process end here alike. No torch: what is to be said about tensors comes as an `Outline`.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import msgspec

import argosy
from argosy.checkpoint import bands, manifests, names, signatures, tables, trees
from argosy.checkpoint.bands import Bands
from argosy.checkpoint.commits import Staging
from argosy.checkpoint.headers import dtype_in_file
from argosy.checkpoint.layouts import FileImage, Image
from argosy.checkpoint.manifests import FileRecord, Manifest, Parent, Part, TensorRecord
from argosy.checkpoint.tables import CellsWritten, Written
from argosy.checkpoint.votes import Common
from argosy.errors import ConfigError


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says besides files and tensors."""

    step: int
    run: str = ""
    parent: Parent | None = None
    world: int = 1
    metrics: dict[str, float | None] = {}
    attachments: dict[str, bytes] = {}
    """Small files that lie beside the data: a model's config.json."""
    signing_key: str = ""
    """A file with the private key that signs the manifest; unsigned without one."""


def finite(metrics: Mapping[str, SupportsFloat]) -> dict[str, float | None]:
    """As they can stand in a manifest: JSON has no NaN and no infinity."""
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _number(name: str, value: SupportsFloat) -> float:
    # Of a loss that still has its graph torch warns when it is made a number.
    detach = getattr(value, "detach", None)
    try:
        return float(value if detach is None else detach())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the metric `{name}` is not one number: {error}", fix="give a number, e.g. loss.item()"
        ) from None


def attached(files: Any) -> dict[str, bytes]:
    """Whatever can stand beside the data; refused before anything is written."""
    if not isinstance(files, Mapping):
        raise ConfigError(
            f"attachments are a {type(files).__name__}", fix='give files by name: {"x.json": data}'
        )
    for name, data in files.items():
        if not isinstance(name, str) or not names.is_attachment(name):
            raise _not_attachable(name)
        if not isinstance(data, bytes):
            raise ConfigError(
                f"the attachment {name!r} is {type(data).__name__}, not bytes",
                fix="encode texts: text.encode()",
            )
    return dict(files)


def _not_attachable(name: object) -> ConfigError:
    """It cannot lie in a checkpoint under that name."""
    return ConfigError(f"a file cannot be attached as {name!r}", fix="use another name")


class Reused(msgspec.Struct, frozen=True, kw_only=True):
    """A file that an earlier checkpoint has as it is now: it is linked and not written."""

    record: FileRecord
    bands: dict[str, Bands] = {}
    """Checksums of columns of its tensors, by name."""


class Outline(msgspec.Struct, frozen=True, kw_only=True):
    """All that a commit needs besides what was written; it crosses to the writer process."""

    facts: Facts
    image: Image
    common: Common
    values: bytes
    """The file of values as it will be; nothing when there are none."""
    reused: dict[str, Reused] = {}
    """Files that are linked from an earlier checkpoint, by name."""


def outline_of(facts: Facts, image: Image, common: Common) -> Outline:
    """The outline of a save; who holds what is settled by then."""
    values = trees.write(common.values) if common.values else b""
    slim = msgspec.structs.replace(common, values={}, holders={})
    return Outline(facts=facts, image=image, common=slim, values=values)


def commit(staging: Staging, outline: Outline, written: Sequence[Written]) -> bytes:
    """Write the small files and the manifest, and make it a checkpoint; the manifest's bytes."""
    facts = outline.facts
    small = write_small(staging, outline.image, outline.values)
    for name, data in facts.attachments.items():
        if name in small or not names.is_attachment(name):
            raise _not_attachable(name)
        small[name] = staging.write_file(name, data, "extra")
    manifest = manifest_of(outline, written, small)
    if not facts.signing_key:
        data = manifests.encode(manifest)
        staging.commit(data)
        return data
    data = manifests.encode(signatures.with_digests(staging, manifest))
    staging.commit(data, signatures.sign(data, Path(facts.signing_key)))
    return data


def manifest_of(
    outline: Outline, written: Sequence[Written], small: Mapping[str, FileRecord]
) -> Manifest:
    """The commit record of what was written; CheckpointDamaged when that is not every byte once."""
    facts, image, common = outline.facts, outline.image, outline.common
    by_file: dict[str, list[Written]] = {}
    for one in written:
        by_file.setdefault(one.file, []).append(one)
    files = {
        file.name: outline.reused[file.name].record
        if file.name in outline.reused
        else record_of(file, by_file.get(file.name, []))
        for file in image.files
    }
    return Manifest(
        step=facts.step,
        run=facts.run,
        saved_at=round(time.time(), 3),
        writer=f"argosy {argosy.__version__}",
        parent=facts.parent,
        world={"size": facts.world},
        metrics=facts.metrics,
        files=files | dict(small),
        tensors=tensors_of(outline, written),
        aliases=common.aliases,
        values=names.VALUES if names.VALUES in small else None,
    )


def record_of(file: FileImage, written: Sequence[Written]) -> FileRecord:
    """A data file's record from all that was written of it."""
    chunk = tables.chunk_bytes_for(file.size)
    table = tables.join(file.size, chunk, written)
    return FileRecord(kind=file.kind, size=file.size, chunk_bytes=chunk, crc32c=tables.pack(table))


def tensors_of(outline: Outline, written: Sequence[Written]) -> dict[str, TensorRecord]:
    """Where each tensor lies, with the checksums of its columns where there are some."""
    image, common = outline.image, outline.common
    cells: dict[tuple[str, str], list[CellsWritten]] = {}
    for one in written:
        for cell in one.cells:
            cells.setdefault((one.file, cell.name), []).append(cell)
    blocks = _blocks_of(image, written)
    wanted = {one.name: one for one in common.wanted}
    parts: dict[str, list[Part]] = {one.name: [] for one in common.wanted}
    for file in image.files:
        for slot in file.slots:
            own = cells.get((file.name, slot.name))
            grid = bands.grid_of(slot.shape, slot.item_bytes) if own else None
            # A process without native code makes no cells: then the tensor has none at all.
            is_whole = own is not None and len(own) == blocks.get((file.name, slot.name))
            table = bands.join(grid, own) if grid is not None and own and is_whole else None
            if file.name in outline.reused:
                table = outline.reused[file.name].bands.get(slot.name)
            parts[slot.name].append(
                Part(file=file.name, offset=slot.offset, box=slot.box, bands=table)
            )
    return {
        name: TensorRecord(
            kind=wanted[name].kind,
            dtype=dtype_in_file(wanted[name].dtype, name),
            shape=wanted[name].shape,
            parts=tuple(own),
            meaning=common.meanings.get(name),
        )
        for name, own in parts.items()
    }


def _blocks_of(image: Image, written: Sequence[Written]) -> dict[tuple[str, str], int]:
    """How often a block with bytes of each tensor was written."""
    starts: dict[str, list[int]] = {}
    for one in written:
        starts.setdefault(one.file, []).append(one.start)
    found = {}
    for file in image.files:
        own = sorted(starts.get(file.name, []))
        for slot in file.slots:
            low = bisect_right(own, slot.offset - tables.BLOCK_BYTES)
            found[file.name, slot.name] = bisect_left(own, slot.stop) - low
    return found


def write_small(staging: Staging, image: Image, values: bytes) -> dict[str, FileRecord]:
    """The index over the weights and the values."""
    found = {}
    weights = [file for file in image.files if file.kind in ("frozen", "model")]
    if weights and all(slot.box is None for file in weights for slot in file.slots):
        where = {slot.name: file.name for file in weights for slot in file.slots}
        total = sum(slot.num_bytes for file in weights for slot in file.slots)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        data = json.dumps(index, indent=1, ensure_ascii=False).encode()
        found[names.INDEX] = staging.write_file(names.INDEX, data, "model")
    if values:
        found[names.VALUES] = staging.write_file(names.VALUES, values, "extra")
    return found
