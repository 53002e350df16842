"""Where the files of a checkpoint lie: `Place` is what a reader needs of it, `Directory` is one on disk. No torch.

A directory is opened once and its files by descriptors under it, without following links. Folders own a place; objects of a store that is no disk
are places of tiers/.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from argosy.checkpoint import directio, names
from argosy.checkpoint.directio import Files
from argosy.checkpoint.manifests import FileRecord
from argosy.errors import CheckpointDamaged, NotFoundError

_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Nothing is there, or a link, which is not followed. Whatever else goes wrong says nothing about the checkpoint."""


class Place(Protocol):
    """Files of one checkpoint, for reading."""

    path: Path
    """Its last part is the checkpoint's name."""
    where: str
    """For people: a path or an address."""
    files: Files
    """Reads what `open` gives."""

    def read_manifest(self) -> bytes:
        """MANIFEST.json; CheckpointDamaged when there is none."""

    def read_small(self, name: str, most_bytes: int) -> bytes | None:
        """A file that no manifest lists; None when there is none, CheckpointDamaged when it is longer."""

    def open(self, name: str, record: FileRecord) -> tuple[int, bool]:
        """A descriptor of a file of the manifest, which has the right size, and whether it is read past the page cache."""

    def give_back(self, descriptor: int) -> None:
        """It is not read any more."""

    def close(self) -> None:
        """Nothing is read any more."""


class Directory:
    """A checkpoint on disk."""

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self.where = str(path)
        self.files = files
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(
                f"{path} is no checkpoint: there is no such directory",
                fix="give a step-… directory, or a step that `argosy checkpoint ls` shows",
            )
        except OSError as failure:
            raise directio.disk_error(failure, f"{path} cannot be opened")

    def read_manifest(self) -> bytes:
        """All of it."""
        data = self.read_small(names.MANIFEST, names.MOST_MANIFEST_BYTES)
        if data is None:
            raise CheckpointDamaged(
                f"{self.path} has no {names.MANIFEST}: it is no checkpoint, or was not copied whole",
                fix="use another checkpoint",
            )
        return data

    def read_small(self, name: str, most_bytes: int) -> bytes | None:
        """All of it."""
        try:
            descriptor = self.files.open(name, os.O_RDONLY, self._fd)
        except OSError as failure:
            if failure.errno in _NO_SUCH_FILE:
                return None
            raise directio.disk_error(failure, f"{self.path / name} cannot be opened")
        try:
            size = os.fstat(descriptor).st_size
            if size > most_bytes:
                raise CheckpointDamaged(f"{self.path / name} has {size} bytes: more than allowed")
            data = bytearray(size)
            done = 0
            while done < size:
                count = self.files.read(descriptor, memoryview(data)[done:], done)
                if count <= 0:
                    break
                done += count
            return bytes(data[:done])
        except OSError as failure:
            raise directio.disk_error(failure, f"{self.path / name} cannot be read")
        finally:
            os.close(descriptor)

    def open(self, name: str, record: FileRecord) -> tuple[int, bool]:
        """Here, or in the directory that the record refers to."""
        with self.directory_of(name, record) as (directory, file):
            return directio.open_data(self.files, file, directory, record.size, self.path.name)

    @contextmanager
    def directory_of(self, name: str, record: FileRecord) -> Iterator[tuple[int, str]]:
        """Where a file lies: a descriptor that is open within, and the name there."""
        if record.stored == "here" or record.origin is None:
            yield self._fd, name
            return
        other = self.path.absolute().parent / names.step_name(record.origin.step)
        try:
            directory = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as failure:
            if failure.errno not in _NO_SUCH_FILE:
                raise directio.disk_error(failure, f"{other} cannot be opened")
            raise CheckpointDamaged(
                f"{self.path.name} refers to {other.name}, which is gone",
                fix="use another checkpoint",
            )
        try:
            yield directory, record.origin.file
        finally:
            os.close(directory)

    def give_back(self, descriptor: int) -> None:
        """Close it."""
        os.close(descriptor)

    def close(self) -> None:
        """Give the directory back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
