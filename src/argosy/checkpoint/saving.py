"""The way from a state to a committed checkpoint: plan, blocks, index, values, manifest, commit; alone or with others.

The checkpointer calls it for blocking saves; the writer process takes the same steps from a staged snapshot. Whatever goes wrong leaves no staging
directory behind, and tells the other processes of the save.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec

import argosy
from argosy.checkpoint import bands, boards, directio, manifests, names, tables, trees, votes
from argosy.checkpoint.blocks import BlockWriter, Pace
from argosy.checkpoint.boards import FileBoard, Group
from argosy.checkpoint.books import Book
from argosy.checkpoint.commits import Staging, Store
from argosy.checkpoint.directio import Files
from argosy.checkpoint.gathering import TensorSource
from argosy.checkpoint.headers import dtype_in_file
from argosy.checkpoint.layouts import FileImage, Image, plan_image, plan_shards
from argosy.checkpoint.manifests import FileRecord, Manifest, Parent, Part, TensorRecord
from argosy.checkpoint.shares import Duty, plan_boxes, plan_shares
from argosy.checkpoint.sources import Source
from argosy.checkpoint.tables import CellsWritten, Written
from argosy.checkpoint.votes import Common, Vote
from argosy.errors import ConfigError, TimedOut
from argosy.move.dtypes import itemsize

_FAREWELL_SECONDS = 2.0


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says besides files and tensors."""

    step: int
    run: str = ""
    parent: Parent | None = None
    world: int = 1
    metrics: dict[str, float] = {}
    attachments: dict[str, bytes] = {}
    """Small files that lie beside the data: a model's config.json."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How bytes get to the disk; with `shards` each process writes its own files, for file systems where several cannot write into one."""

    shards: bool = False
    files: Files
    threads: int
    pace: Pace | None = None


def save(store: Store, facts: Facts, book: Book, settings: Settings) -> bytes:
    """By this process alone; the manifest's bytes."""
    staging = store.stage(facts.step)
    try:
        common = votes.merge([votes.said_by(0, facts.step, book)])
        image = plan_image(common.wanted)
        duties = plan_shares(image, common.holders, [0])[0]
        directio.check_space(settings.files, staging.fd, image.num_bytes, f"step {facts.step}")
        written = _write(staging, image, duties, TensorSource(image, book.entries), settings)
        return _commit(staging, facts, image, written, common)
    except BaseException:
        staging.abandon()
        raise


def save_together(
    store: Store,
    facts: Facts,
    gather: Callable[[], Book],
    group: Group,
    settings: Settings,
) -> bytes | None:
    """With the other members of a group, who all call it; the manifest's bytes on the rank that commits, None elsewhere.

    `gather` may fail: the others are then told why.
    """
    staging = store.stage(facts.step, group.next_nonce())
    board = FileBoard(staging.path)
    try:
        mine = votes.encode(votes.said_by(group.rank, facts.step, book := gather()))
        said = boards.exchange(board, votes.SAID, mine, group)
        common = votes.merge(votes.decode_said(said))
        image, duties = _plan(common, group, settings)
        if group.rank == 0:
            directio.check_space(settings.files, staging.fd, image.num_bytes, f"step {facts.step}")
        source = TensorSource(image, book.entries)
        written = _write(staging, image, duties, source, settings)
        vote = votes.encode(Vote(rank=group.rank, written=tuple(written)))
        board.post(f"{votes.VOTE}-{group.rank:05d}", vote)
        if group.rank != 0:
            wait_committed(store, staging, board, group)
            staging.leave()
            return None
        cast = votes.decode_votes(boards.gather(board, votes.VOTE, group))
        board.remove(votes.keys_of(group.size))
        return _commit(staging, facts, image, votes.all_written(cast), common)
    except BaseException as failure:
        _give_up(staging, board, group, failure)
        raise


def _plan(common: Common, group: Group, settings: Settings) -> tuple[Image, list[Duty]]:
    """The image of all files, and what this process writes of them."""
    if not settings.shards:
        image = plan_image(common.wanted)
        return image, plan_shares(image, common.holders, range(group.size))[group.rank]
    sizes = [(one.name, itemsize(one.dtype)) for one in common.wanted]
    boxes = plan_boxes(sizes, common.holders, range(group.size))
    files: list[FileImage] = []
    duties: list[Duty] = []
    for rank in range(group.size):
        own = [(one, boxes[rank][one.name]) for one in common.wanted if one.name in boxes[rank]]
        for file in plan_shards(own, rank).files:
            if rank == group.rank:
                starts = range(0, file.size, tables.BLOCK_BYTES)
                stops = [min(file.size, start + tables.BLOCK_BYTES) for start in starts]
                duties += map(Duty, repeat(len(files)), starts, stops)
            files.append(file)
    return Image(files=tuple(files)), duties


def wait_committed(store: Store, staging: Staging, board: FileBoard, group: Group) -> None:
    """Until the step is there; PartnerFailed when the committing rank gives up, TimedOut when it says nothing."""
    final = store.path / staging.final / names.MANIFEST
    deadline = time.monotonic() + group.seconds
    pause = 0.001
    while not final.exists():
        boards.check_failures(board, group)
        if not staging.path.exists() and not final.exists():
            raise boards.PartnerFailed(
                f"the save of step {staging.step} was given up by rank 0", fix="see its own error"
            )
        if time.monotonic() > deadline:
            raise TimedOut(
                f"rank 0 has not committed step {staging.step} within {group.seconds:.0f} s",
                fix="see whether it lives",
            )
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)


def _give_up(staging: Staging, board: FileBoard, group: Group, failure: BaseException) -> None:
    """Tell the others; the one that would commit clears up when they know."""
    try:
        boards.tell_failure(board, group, failure)
        if group.rank == 0:
            boards.wait_all_failed(board, group, _FAREWELL_SECONDS)
    except (OSError, boards.PartnerFailed):
        pass  # the directory is gone or the disk is: the others find that out by themselves
    if group.rank == 0:
        staging.abandon()
    else:
        staging.leave()


def _write(
    staging: Staging, image: Image, duties: Sequence[Duty], source: Source, settings: Settings
) -> list[Written]:
    writer = BlockWriter(
        staging.fd,
        image,
        source,
        threads=settings.threads,
        pace=settings.pace,
        files=settings.files,
    )
    return writer.write(duties)


def _commit(
    staging: Staging, facts: Facts, image: Image, written: Sequence[Written], common: Common
) -> bytes:
    small = write_small(staging, image, common.values)
    for name, data in facts.attachments.items():
        if name in small or not names.is_attachment(name):
            raise ConfigError(f"a file cannot be attached as {name!r}", fix="use another name")
        small[name] = staging.write_file(name, data, "extra")
    data = manifests.encode(manifest_of(facts, image, written, small, common))
    staging.commit(data)
    return data


def manifest_of(
    facts: Facts,
    image: Image,
    written: Sequence[Written],
    small: Mapping[str, FileRecord],
    common: Common,
) -> Manifest:
    """The commit record of what was written; CheckpointDamaged when that is not every byte once."""
    by_file: dict[str, list[Written]] = {}
    for one in written:
        by_file.setdefault(one.file, []).append(one)
    files = {file.name: record_of(file, by_file.get(file.name, [])) for file in image.files}
    return Manifest(
        step=facts.step,
        run=facts.run,
        saved_at=round(time.time(), 3),
        writer=f"argosy {argosy.__version__}",
        parent=facts.parent,
        world={"size": facts.world},
        metrics=facts.metrics,
        files=files | dict(small),
        tensors=tensors_of(image, common, written),
        aliases=common.aliases,
        values=names.VALUES if names.VALUES in small else None,
    )


def record_of(file: FileImage, written: Sequence[Written]) -> FileRecord:
    """A data file's record from all that was written of it."""
    chunk = tables.chunk_bytes_for(file.size)
    table = tables.join(file.size, chunk, written)
    return FileRecord(kind=file.kind, size=file.size, chunk_bytes=chunk, crc32c=tables.pack(table))


def tensors_of(image: Image, common: Common, written: Sequence[Written]) -> dict[str, TensorRecord]:
    """Where each tensor lies, with the checksums of its columns where there are some."""
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


def write_small(staging: Staging, image: Image, values: Mapping[str, Any]) -> dict[str, FileRecord]:
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
        found[names.VALUES] = staging.write_file(names.VALUES, trees.write(values), "extra")
    return found


def path_of(store: Store, step: int) -> Path:
    """Where a committed step lies."""
    return store.path / names.step_name(step)
