"""Checkpoints in an object store, seen from outside: which are there, and their files by byte ranges, verified and decrypted on the way.

`RemoteListing` is the `Listing` of a prefix, `ObjectPlace` the place of one checkpoint: everything that reads checkpoints reads these. Only what is
asked for is fetched, in stretches, so memory stays bounded. No torch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from argosy.checkpoint import names, tables
from argosy.checkpoint.directio import Files
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.manifests import FileRecord
from argosy.checkpoint.tiers import ciphers
from argosy.checkpoint.tiers.buckets import Bucket, Found
from argosy.checkpoint.tiers.ciphers import Seal, Secret
from argosy.checkpoint.tiers.settings import Objects
from argosy.errors import CheckpointDamaged, NotFoundError


@dataclass(frozen=True, kw_only=True)
class _Object:
    path: str
    size: int
    chunk_bytes: int
    seal: Seal | None


class ObjectFiles(Files):
    """Reads objects as if they were files; every read is one request."""

    is_disk = False

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._known: dict[int, _Object] = {}
        self._numbers = itertools.count()

    def add(self, path: str, record: FileRecord, seal: Seal | None) -> int:
        """A number that stands for an object."""
        number = next(self._numbers)
        self._known[number] = _Object(
            path=path, size=record.size, chunk_bytes=record.chunk_bytes, seal=seal
        )
        return number

    def forget(self, number: int) -> None:
        """It is not read any more."""
        self._known.pop(number, None)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """A stretch; of an encrypted object it begins with a chunk and has whole ones."""
        one = self._known[descriptor]
        length = min(len(into), one.size - offset)
        if length <= 0:
            return 0
        if one.seal is None:
            data = self._fetched(one, offset, length)
            into[: len(data)] = data
            return len(data)
        first, count = offset // one.chunk_bytes, tables.num_chunks(one.size, one.chunk_bytes)
        if offset % one.chunk_bytes:
            raise ValueError(f"{one.path} is read from {offset}, within a chunk")
        start = ciphers.HEADER_BYTES + first * (one.chunk_bytes + ciphers.TAG_BYTES)
        more = tables.num_chunks(length, one.chunk_bytes) * ciphers.TAG_BYTES
        data = self._fetched(one, start, length + more)
        return one.seal.open(data, into, first, count, one.chunk_bytes)

    def _fetched(self, one: _Object, start: int, length: int) -> memoryview:
        data = self._bucket.read_range(one.path, start, length)
        if data is None:
            raise CheckpointDamaged(f"{one.path} has gone", fix="use another checkpoint")
        return memoryview(data)


class ObjectPlace:
    """Where the files of one checkpoint lie in a bucket."""

    def __init__(self, bucket: Bucket, step: int, secret: Secret | None) -> None:
        self._bucket = bucket
        self._step = step
        self._secret = secret
        self._is_sealed = False
        self._name = names.step_name(step)
        self.path = Path(self._name)
        self.where = f"{bucket.url}/{self._name}"
        self._objects = ObjectFiles(bucket)
        self.files: Files = self._objects
        self._listed: dict[str, dict[str, Found]] = {}

    def read_manifest(self) -> bytes:
        """Decrypted, if need be."""
        most = 2 * names.MOST_MANIFEST_BYTES
        data = self.read_small(names.MANIFEST, most)
        if data is None:
            raise CheckpointDamaged(
                f"{self.where} has no {names.MANIFEST}: it is no checkpoint, or was not copied whole",
                fix="use another checkpoint",
            )
        plain = ciphers.open_manifest(self._secret, self._step, data, self.where)
        self._is_sealed = plain is not data
        return plain

    def read_small(self, name: str, most_bytes: int) -> bytes | None:
        """All of it."""
        data = self._bucket.read_range(f"{self._name}/{name}", 0, most_bytes + 1)
        if data is None:
            return None
        if len(data) > most_bytes:
            raise CheckpointDamaged(f"{name} of {self.where} has more than {most_bytes} bytes")
        return bytes(data)

    def open(self, name: str, record: FileRecord) -> tuple[int, bool]:
        """An object of the right size, here or where the record refers to."""
        path = path_of(self._step, name, record)
        found = self._found(path)
        if found is None:
            raise CheckpointDamaged(
                f"{self.where} lacks its file {path}", fix="use another checkpoint"
            )
        check_size(f"{self._bucket.url}/{path}", found, record, self._is_sealed)
        return self._objects.add(path, record, self._seal_of(path)), False

    def give_back(self, descriptor: int) -> None:
        """Forget it."""
        self._objects.forget(descriptor)

    def close(self) -> None:
        """Nothing is held."""

    def _found(self, path: str) -> Found | None:
        """By listing its directory once: one request for a thousand files."""
        directory = path.partition("/")[0]
        if directory not in self._listed:
            self._listed[directory] = self._bucket.list(directory)
        return self._listed[directory].get(path)

    def _seal_of(self, path: str) -> Seal | None:
        if not self._is_sealed or self._secret is None:
            return None
        header = self._bucket.read_range(path, 0, ciphers.HEADER_BYTES)
        return self._secret.opening(bytes(header or b""), path)


class RemoteListing(Listing):
    """The checkpoints under an address."""

    def __init__(self, bucket: Bucket, secret: Secret | None = None) -> None:
        super().__init__(Path(bucket.url.rpartition("/")[2] or "objects"))
        self.where = bucket.url
        self.bucket = bucket
        self.secret = secret

    @classmethod
    def of(cls, objects: Objects, *, patience_seconds: float = 60.0) -> RemoteListing:
        """As a run describes it."""
        secret = Secret.read(objects.key) if objects.key else None
        return cls(Bucket(objects.url, objects.options, patience_seconds=patience_seconds), secret)

    def objects(self) -> dict[str, Found]:
        """Everything that lies there now, by path."""
        return self.bucket.list()

    def steps(self) -> list[int]:
        """Committed steps, rising."""
        return committed(self.objects())

    def directory_of(self, step: int) -> Path:
        """There is none: who needs one pulls the checkpoint first."""
        raise NotFoundError(
            f"{self.where} is no directory",
            fix=f"argosy checkpoint pull {self.where} DIRECTORY {step}",
        )

    def place_of(self, step: int) -> ObjectPlace:
        """What a `Folder` is made from."""
        if self.bucket.look(f"{names.step_name(step)}/{names.MANIFEST}") is None:
            self.check_known(step)
        return ObjectPlace(self.bucket, step, self.secret)

    def pins(self) -> dict[int, str]:
        """Pinned steps with their reasons."""
        found = {}
        for path in self.bucket.list(names.PINS):
            step = names.step_of(path.rpartition("/")[2])
            if step is not None:
                text = self.bucket.read(path) or b""
                found[step] = text.decode(errors="replace").strip()
        return found

    def pin(self, step: int, why: str = "") -> None:
        """Keep a step for ever."""
        self.check_known(step)
        data = f"{why}\n".encode()
        self.bucket.put(f"{names.PINS}/{names.step_name(step)}", len(data), lambda: iter([data]))
        self.check_known(step)

    def unpin(self, step: int) -> None:
        """Let retention decide again."""
        path = f"{names.PINS}/{names.step_name(step)}"
        if self.bucket.look(path) is None:
            raise NotFoundError(f"step {step} of {self.where} is not pinned")
        self.bucket.remove([path])


def committed(paths: dict[str, Found]) -> list[int]:
    """Steps that have a manifest, rising."""
    found = []
    for path in paths:
        head, _, tail = path.partition("/")
        step = names.step_of(head)
        if step is not None and tail == names.MANIFEST:
            found.append(step)
    return sorted(found)


def path_of(step: int, name: str, record: FileRecord) -> str:
    """Where a file of a step lies."""
    if record.stored == "origin" and record.origin is not None:
        return f"{names.step_name(record.origin.step)}/{record.origin.file}"
    return f"{names.step_name(step)}/{name}"


def size_of(record: FileRecord, is_sealed: bool) -> int:
    """Bytes of the object that holds a file."""
    return ciphers.sealed_size(record.size, record.chunk_bytes) if is_sealed else record.size


def check_size(where: str, found: Found, record: FileRecord, is_sealed: bool) -> None:
    """CheckpointDamaged when an object cannot hold the file."""
    wanted = size_of(record, is_sealed)
    if found.size != wanted:
        raise CheckpointDamaged(
            f"{where} has {found.size} bytes, not {wanted}", fix="use another checkpoint"
        )
