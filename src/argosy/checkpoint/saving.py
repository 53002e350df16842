"""One process's way from a state to a committed checkpoint: image, blocks, index, values, manifest.

The checkpointer calls it for blocking saves; the writer process takes the same steps from a staged snapshot. Several processes: votes.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import msgspec

import argosy
from argosy.checkpoint import directio, manifests, names, tables, trees
from argosy.checkpoint.blocks import BlockWriter, Pace
from argosy.checkpoint.books import Book
from argosy.checkpoint.commits import Staging
from argosy.checkpoint.directio import Files
from argosy.checkpoint.gathering import TensorSource
from argosy.checkpoint.layouts import FileImage, Image, plan_image
from argosy.checkpoint.manifests import FileRecord, Manifest, Parent, Part, TensorRecord
from argosy.checkpoint.shares import plan_shares
from argosy.checkpoint.tables import Written


def write_alone(
    staging: Staging, book: Book, *, files: Files, threads: int, pace: Pace | None = None
) -> tuple[Image, list[Written]]:
    """All data files, by this process alone."""
    image = plan_image(entry.wanted for entry in book.entries)
    directio.check_space(files, staging.fd, image.num_bytes, f"step {staging.step}")
    holders = {entry.name: {0: entry.boxes} for entry in book.entries}
    duties = plan_shares(image, holders, [0])[0]
    writer = BlockWriter(
        staging.fd,
        image,
        TensorSource(image, book.entries),
        threads=threads,
        pace=pace,
        files=files,
    )
    return image, writer.write(duties)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says besides files and tensors."""

    step: int
    run: str = ""
    parent: Parent | None = None
    world: int = 1
    metrics: dict[str, float] = {}


def manifest_of(
    facts: Facts,
    image: Image,
    written: Sequence[Written],
    small: Mapping[str, FileRecord],
    book: Book,
) -> Manifest:
    """The commit record of what was written."""
    by_file: dict[str, list[Written]] = {}
    for one in written:
        by_file.setdefault(one.file, []).append(one)
    files = {file.name: record_of(file, by_file.get(file.name, [])) for file in image.files}
    meanings = {entry.name: entry.meaning for entry in book.entries}
    return Manifest(
        step=facts.step,
        run=facts.run,
        saved_at=round(time.time(), 3),
        writer=f"argosy {argosy.__version__}",
        parent=facts.parent,
        world={"size": facts.world},
        metrics=facts.metrics,
        files=files | dict(small),
        tensors=tensors_of(image, meanings),
        aliases=book.aliases,
        values=names.VALUES if names.VALUES in small else None,
    )


def record_of(file: FileImage, written: Sequence[Written]) -> FileRecord:
    """A data file's record from all that was written of it."""
    chunk = tables.chunk_bytes_for(file.size)
    table = tables.join(file.size, chunk, written)
    return FileRecord(kind=file.kind, size=file.size, chunk_bytes=chunk, crc32c=tables.pack(table))


def tensors_of(image: Image, meanings: Mapping[str, str | None]) -> dict[str, TensorRecord]:
    """Where each tensor lies."""
    return {
        slot.name: TensorRecord(
            kind=file.kind,
            dtype=slot.dtype,
            shape=slot.shape,
            parts=(Part(file=file.name, offset=slot.offset),),
            meaning=meanings.get(slot.name),
        )
        for file in image.files
        for slot in file.slots
    }


def write_small(
    staging: Staging, image: Image, values: Mapping[str, object]
) -> dict[str, FileRecord]:
    """The index over the weights and the values."""
    found = {}
    weights = {
        slot.name: file.name
        for file in image.files
        for slot in file.slots
        if file.kind in ("frozen", "model")
    }
    if weights:
        total = sum(
            slot.num_bytes
            for file in image.files
            if file.kind in ("frozen", "model")
            for slot in file.slots
        )
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        data = json.dumps(index, indent=1, ensure_ascii=False).encode()
        found[names.INDEX] = staging.write_file(names.INDEX, data, "model")
    if values:
        found[names.VALUES] = staging.write_file(names.VALUES, trees.write(values), "extra")
    return found


def commit(staging: Staging, manifest: Manifest) -> bytes:
    """The last step; the bytes of the manifest."""
    data = manifests.encode(manifest)
    staging.commit(data)
    return data
