"""Files that have not changed since the checkpoint before: found by their checksums in memory, linked instead of written.

Each process checks what it would write against the table of the earlier file and stops at the first difference, so a file that changed costs one
block. Together they agree which files are the same. Frozen weights are the reason, but any file may be. No torch: the writer process calls it too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from argosy.checkpoint import boards, checksums, manifests, names, tables
from argosy.checkpoint.absences import Absences
from argosy.checkpoint.bands import Bands
from argosy.checkpoint.boards import FileBoard, Group
from argosy.checkpoint.commits import Staging
from argosy.checkpoint.directio import BLOCKS, Files
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.layouts import FileImage, Image
from argosy.checkpoint.manifests import FileRecord, Manifest, Origin, Parent
from argosy.checkpoint.places import Directory
from argosy.checkpoint.records import Outline, Reused
from argosy.checkpoint.shares import Duty
from argosy.checkpoint.sources import Source
from argosy.checkpoint.tables import Written
from argosy.checkpoint.votes import SAME
from argosy.errors import ArgosyError, CheckpointDamaged

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES)


class Probed(msgspec.Struct, frozen=True, array_like=True):
    """What one process found about one file: that it has changed, or the checksums of what it would write of it."""

    file: str
    has_changed: bool
    written: tuple[Written, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A save without what need not be written."""

    outline: Outline
    duties: list[Duty]


def reduce(
    staging: Staging,
    outline: Outline,
    duties: Sequence[Duty],
    source: Source,
    group: Group,
    *,
    files: Files,
    threads: int = 2,
) -> Reduced:
    """Take files that are as the parent has them out of the duties, and link them into the staging directory; all members of the group call it."""
    parent = outline.facts.parent
    if parent is None:
        return Reduced(outline=outline, duties=list(duties))
    base = _base_of(staging, parent, files)
    manifest = base.manifest if base is not None else None
    mine: list[Probed] = []
    if manifest is not None:
        mine = probe(outline.image, source, duties, manifest, threads=threads)
    said = [mine]
    if not group.is_alone:
        board = FileBoard(staging.path)
        told = boards.exchange(
            board, SAME, msgspec.json.encode(mine), group, Absences(board, group).check
        )
        said = [msgspec.json.decode(one, type=list[Probed]) for one in told]
    if base is None or manifest is None:
        # The others have heard of no file that is the same here, so none is reused.
        return Reduced(outline=outline, duties=list(duties))
    with base:
        same = unchanged(outline.image, manifest, said)
        stored = _link(staging, base, same, files) if group.rank == 0 else dict.fromkeys(same, "")
    reused = {
        name: Reused(
            record=_reused_record(manifest, name, where or "here"),
            bands=_bands_of(manifest, name),
        )
        for name, where in stored.items()
    }
    rest = [duty for duty in duties if outline.image.files[duty.file].name not in reused]
    return Reduced(outline=msgspec.structs.replace(outline, reused=reused), duties=rest)


def probe(
    image: Image, source: Source, duties: Sequence[Duty], base: Manifest, *, threads: int = 2
) -> list[Probed]:
    """What this process can say about each file that the base may have as it is now."""
    found = []
    for number, file in enumerate(image.files):
        if not _may_be_same(file, base):
            continue
        own = [duty for duty in duties if duty.file == number]
        written = _checksums(file, source, own, base.files[file.name], threads)
        found.append(Probed(file.name, written is None, tuple(written or ())))
    return found


def unchanged(image: Image, base: Manifest, said: Sequence[Sequence[Probed]]) -> list[str]:
    """Files whose every chunk, joined from what all processes said, is the base's."""
    by_file: dict[str, list[Probed]] = {}
    for one in said:
        for probed in one:
            by_file.setdefault(probed.file, []).append(probed)
    found = []
    for file in image.files:
        heard = by_file.get(file.name, [])
        if len(heard) != len(said) or any(one.has_changed for one in heard):
            continue
        record = base.files[file.name]
        try:
            written = [each for one in heard for each in one.written]
            table = tables.join(record.size, record.chunk_bytes, written)
        except CheckpointDamaged:
            continue
        if tables.pack(table) == record.crc32c:
            found.append(file.name)
    return found


def _may_be_same(file: FileImage, base: Manifest) -> bool:
    record = base.files.get(file.name)
    if record is None or record.kind != file.kind or record.size != file.size:
        return False
    return record.chunk_bytes == tables.chunk_bytes_for(file.size)


def _checksums(
    file: FileImage, source: Source, duties: Iterable[Duty], record: FileRecord, threads: int
) -> list[Written] | None:
    """Linear checksums of what this process would write; None as soon as a block differs."""
    table = tables.unpack(record.crc32c, file.name)
    has_changed = threading.Event()

    def one(duty: Duty) -> Written | None:
        if has_changed.is_set():
            return None
        length = duty.stop - duty.start
        address = source.view(duty)
        pieces = source.pieces(duty) if address is None else None
        if address is not None:
            crcs, num_bytes = checksums.of_chunks(address, length, record.chunk_bytes), length
        elif pieces is not None:
            crcs, num_bytes = checksums.of_pieces(pieces, record.chunk_bytes), length
        else:
            with BLOCKS.lent() as block:
                if duty.fragments is not None:
                    ctypes.memset(block.address, 0, length)
                runs = source.fill(duty, block.address)
                crcs = checksums.of_chunks(block.address, length, record.chunk_bytes)
            num_bytes = sum(stop - start for start, stop in runs)
        first = duty.start // record.chunk_bytes
        if duty.fragments is None and (crcs != table[first : first + len(crcs)]).any():
            has_changed.set()
            return None
        crcs ^= checksums.of_zero_chunks(length, record.chunk_bytes)
        return Written(
            file=file.name, start=duty.start, num_bytes=num_bytes, crcs=tables.pack(crcs)
        )

    with ThreadPoolExecutor(threads, thread_name_prefix="argosy-probes") as pool:
        found = [written for written in pool.map(one, duties) if written is not None]
    return None if has_changed.is_set() else found


def _base_of(staging: Staging, parent: Parent, files: Files) -> Folder | None:
    """The parent's manifest, if it is still the one that the run saved, and not known to be damaged."""
    if (staging.store.path / names.damaged_name(parent.step)).exists():
        return None
    try:
        path = staging.store.path / names.step_name(parent.step)
        base = Folder(path, files=files, known_crc=parent.crc32c)
    except ArgosyError:
        return None
    if manifests.crc_of(base.manifest_bytes) != parent.crc32c or base.step >= staging.step:
        base.close()
        return None
    return base


def _link(staging: Staging, base: Folder, same: Sequence[str], files: Files) -> Mapping[str, str]:
    """Each file linked into the staging directory; where there are no links, referred to."""
    found = {}
    place = base.place
    assert isinstance(place, Directory)
    for name in same:
        with place.directory_of(name, base.manifest.files[name]) as (directory, file):
            try:
                files.link(file, directory, staging.fd)
                found[name] = "here"
            except OSError as failure:
                if failure.errno not in _NO_LINKS:
                    raise CheckpointDamaged(
                        f"{name} of {base.path.name} cannot be linked: {failure.strerror}",
                        fix="save again: without that checkpoint every file is written",
                    )
                found[name] = "origin"
        if found[name] == "here":
            size = os.stat(name, dir_fd=staging.fd, follow_symlinks=False).st_size
            if size != base.manifest.files[name].size:
                raise CheckpointDamaged(
                    f"{name} of {base.path.name} has {size} bytes, not {base.manifest.files[name].size}",
                    fix="save again: without that checkpoint every file is written",
                )
    return found


def _reused_record(base: Manifest, name: str, stored: str) -> FileRecord:
    record = base.files[name]
    origin = record.origin or Origin(step=base.step, file=name)
    if stored == "origin" and record.stored == "here":
        # One hop: the base has the bytes itself, whoever wrote them first.
        origin = Origin(step=base.step, file=name)
    return msgspec.structs.replace(record, origin=origin, stored=stored)


def _bands_of(base: Manifest, name: str) -> dict[str, Bands]:
    return {
        tensor: part.bands
        for tensor, record in base.tensors.items()
        for part in record.parts
        if part.file == name and part.bands is not None
    }
