"""A checkpoint to an object store: its files, several at once, verified while they are read; then the manifest, which is the commit.

Whatever is there already in the right size and with the right mark is not sent again, so that an upload that was cut off goes on. Files that the
newest earlier step there has unchanged are referred to. Called by the process that uploads and by `argosy checkpoint push`. No torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from argosy.checkpoint import fetches, manifests, names, tables
from argosy.checkpoint.directio import BLOCKS
from argosy.checkpoint.fetches import STRETCH_BYTES, Stored
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.manifests import FileRecord, Manifest, Origin
from argosy.checkpoint.tiers import ciphers, claims
from argosy.checkpoint.tiers.buckets import Found
from argosy.checkpoint.tiers.remotes import (
    ObjectFiles,
    ObjectPlace,
    RemoteListing,
    committed,
    path_of,
    size_of,
)
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError

_LOG = logging.getLogger("argosy.checkpoint")
_WORTH_BYTES = 1 << 20
"""Smaller files are sent rather than referred to: nothing is gained by a bond to an older step."""
_MOST_SIGNATURE_BYTES = 4096
Pace = Callable[[int], None]
"""Called before each block is read: rate caps, progress and deadlines live there."""


@dataclass(kw_only=True)
class Sent:
    """What an upload came to, in bytes of plain files."""

    step: int
    sent_bytes: int = 0
    found_bytes: int = 0
    """Of files that an earlier attempt had sent."""
    referred_bytes: int = 0
    """Of files that an earlier step has."""
    is_new: bool = True
    """False when it was committed already."""


def upload(
    folder: Folder,
    remote: RemoteListing,
    *,
    claim: int,
    pace: Pace = lambda num_bytes: None,
    files_at_once: int = 2,
) -> Sent:
    """Send a checkpoint and commit it; ConfigError when the step is another save's, or the prefix another run's."""
    return _Upload(folder, remote, pace).run(claim, files_at_once)


class _Upload:
    def __init__(self, folder: Folder, remote: RemoteListing, pace: Pace) -> None:
        self._folder = folder
        self._remote = remote
        self._bucket = remote.bucket
        self._secret = remote.secret
        self._pace = pace
        self._step = folder.step
        self._directory = names.step_name(folder.step)
        self._there: dict[str, Found] = {}
        self._tags: dict[str, str] = {}
        self._lock = threading.Lock()
        self._sent = Sent(step=folder.step)

    def run(self, claim: int, files_at_once: int) -> Sent:
        everything = self._bucket.list()
        self._there = {
            path: found
            for path, found in everything.items()
            if path.startswith(f"{self._directory}/")
        }
        if f"{self._directory}/{names.MANIFEST}" in self._there:
            self._confirm()
            self._sent.is_new = False
            return self._sent
        signature = self._folder.place.read_small(names.SIGNATURE, _MOST_SIGNATURE_BYTES)
        manifest, data = self._folder.manifest, self._folder.manifest_bytes
        if signature is None:
            manifest = referring(manifest, self._base(everything))
            data = manifests.encode(manifest)
        own = self._own_files(manifest, everything)
        # Open before anything is sent: whoever removes the checkpoint from the disk meanwhile does no harm.
        stored = {name: self._folder.stored(name) for name in own}
        with ThreadPoolExecutor(files_at_once, thread_name_prefix="argosy-uploads") as pool:
            order = sorted(own, key=lambda name: -own[name].size)
            for _ in pool.map(lambda name: self._send(name, own[name], stored[name]), order):
                pass
        if signature is not None:
            path = f"{self._directory}/{names.SIGNATURE}"
            self._tags[path] = self._bucket.put(path, len(signature), lambda: iter([signature]))
        self._commit(data, own, claim)
        return self._sent

    def _base(self, everything: dict[str, Found]) -> Manifest | None:
        """The newest earlier step of the prefix, if it can be read."""
        earlier = [step for step in committed(everything) if step < self._step]
        if not earlier:
            return None
        try:
            place = ObjectPlace(self._bucket, earlier[-1], self._secret)
            with Folder(place) as folder:
                return folder.manifest if folder.step == earlier[-1] else None
        except ArgosyError as failure:
            _LOG.warning("step %d: nothing is referred to: %s", self._step, failure.what)
            return None

    def _own_files(self, manifest: Manifest, everything: dict[str, Found]) -> dict[str, FileRecord]:
        """What must lie in the step's own directory; the rest must be there already."""
        own = {}
        for name, record in manifest.files.items():
            path = path_of(self._step, name, record)
            if path == f"{self._directory}/{name}":
                own[name] = record
                continue
            found = everything.get(path)
            if found is None or found.size != size_of(record, self._secret is not None):
                raise ConfigError(
                    f"step {self._step} refers to {path}, which {self._bucket.url} lacks",
                    fix=f"push step {record.origin.step if record.origin else '?'} first",
                )
            self._sent.referred_bytes += record.size
        return own

    def _send(self, name: str, record: FileRecord, stored: Stored) -> None:
        """One file, unless it is there."""
        path = f"{self._directory}/{name}"
        key = self._secret.identity if self._secret is not None else ""
        mark = ciphers.mark_of(record.size, record.chunk_bytes, record.crc32c, key)
        size = size_of(record, self._secret is not None)
        found = self._there.get(path)
        is_there = found is not None and found.size == size and self._holds(path, record, mark)
        if is_there and found is not None:
            tag = found.tag
        else:
            tag = self._bucket.put(path, size, lambda: self._pieces(path, stored), mark)
        with self._lock:
            self._tags[path] = tag
            if is_there:
                self._sent.found_bytes += record.size
            else:
                self._sent.sent_bytes += record.size

    def _holds(self, path: str, record: FileRecord, mark: str) -> bool:
        """Whether an object of the right size has the right bytes: by its mark, or read where objects have none."""
        found = self._bucket.look(path)
        if found is None:
            return False
        if found.mark is not None or self._bucket.directory is None:
            return found.mark == mark
        files = ObjectFiles(self._bucket)
        seal = None
        try:
            if self._secret is not None:
                header = self._bucket.read_range(path, 0, ciphers.HEADER_BYTES)
                seal = self._secret.opening(bytes(header or b""), path)
            there = Stored(
                name=path,
                descriptor=files.add(path, record, seal),
                size=record.size,
                chunk_bytes=record.chunk_bytes,
                table=tables.unpack(record.crc32c, path),
                is_direct=False,
                checkpoint=self._bucket.url,
            )
            fetches.verify([there], threads=1, files=files)
        except CheckpointDamaged:
            return False
        return True

    def _pieces(self, path: str, stored: Stored) -> Iterator[bytes]:
        """A file in blocks, each verified, encrypted if there is a key; a new attempt has a new seal."""
        chunk, count = stored.chunk_bytes, tables.num_chunks(stored.size, stored.chunk_bytes)
        seal = self._secret.sealing(path) if self._secret is not None else None
        if seal is not None:
            yield seal.header
        with BLOCKS.lent() as block:
            for start in range(0, stored.size, STRETCH_BYTES):
                stop = min(stored.size, start + STRETCH_BYTES)
                self._pace(stop - start)
                with self._folder.naming_tensors():
                    fetches.fetch(stored, start, stop, block, self._folder.files)
                view = block.memory[: stop - start]
                yield bytes(view) if seal is None else seal.seal(view, start // chunk, count, chunk)

    def _commit(self, data: bytes, own: dict[str, FileRecord], claim: int) -> None:
        self._bucket.flush(self._tags)
        there = self._bucket.list(self._directory)
        for path, tag in self._tags.items():
            name = path.rpartition("/")[2]
            found = there.get(path)
            size = size_of(own[name], self._secret is not None) if name in own else None
            is_same = found is not None and (size is None or found.size == size)
            if found is None or not is_same or _plain(found.tag) != _plain(tag):
                raise ConfigError(
                    f"{self._bucket.url}/{path} has changed while step {self._step} was sent",
                    fix="let one run upload into one prefix; the next upload sends it again",
                )
        claims.check(self._bucket, claim)
        if self._secret is not None:
            data = ciphers.seal_manifest(self._secret, self._step, data)
        if not self._bucket.create(f"{self._directory}/{names.MANIFEST}", data):
            self._confirm()

    def _confirm(self) -> None:
        """The step is committed there: by this save, or ConfigError."""
        with Folder(ObjectPlace(self._bucket, self._step, self._secret)) as folder:
            if not is_same_save(folder.manifest, self._folder.manifest):
                raise ConfigError(
                    f"{folder.place.where} is another save of step {self._step}: it is never overwritten",
                    fix="give each run a prefix of its own",
                )


def referring(manifest: Manifest, base: Manifest | None) -> Manifest:
    """The manifest for the object store: unchanged files refer to the base, the others are here."""
    known = base.files if base is not None else {}
    files = {}
    for name, record in manifest.files.items():
        same = known.get(name)
        if base is None or same is None or not _is_unchanged(record, same):
            files[name] = msgspec.structs.replace(record, origin=None, stored="here")
            continue
        origin = same.origin if same.stored == "origin" else Origin(step=base.step, file=name)
        files[name] = msgspec.structs.replace(record, origin=origin, stored="origin")
    return msgspec.structs.replace(manifest, files=files)


def is_same_save(first: Manifest, second: Manifest) -> bool:
    """Whether two manifests tell of one save, wherever its files lie."""
    return (
        (first.step, first.saved_at, first.run) == (second.step, second.saved_at, second.run)
        and first.files.keys() == second.files.keys()
        and all(_bytes_of(one) == _bytes_of(second.files[n]) for n, one in first.files.items())
        and first.tensors == second.tensors
    )


def _is_unchanged(record: FileRecord, same: FileRecord) -> bool:
    return record.size >= _WORTH_BYTES and _bytes_of(record) == _bytes_of(same)


def _bytes_of(record: FileRecord) -> tuple[str, int, int, str]:
    return record.kind, record.size, record.chunk_bytes, record.crc32c


def _plain(tag: str) -> str:
    """Stores quote tags differently in answers and listings."""
    return tag.removeprefix("W/").strip('"')
