"""A committed checkpoint's directory: its manifest, its files, open and of the right size, and its values. No torch.

`Folder(directory)` reads and validates the manifest and nothing else. Files are opened when first needed, without following links. The command line
and the verification need no more; `Opened` adds tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from argosy.checkpoint import directio, fetches, manifests, names, tables, trees
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.fetches import DamagedChunk, Stored
from argosy.checkpoint.manifests import Manifest, TensorRecord
from argosy.config.nearest import nearest
from argosy.errors import CheckpointDamaged, NotFoundError


class Folder:
    """One checkpoint, opened for reading; a context manager."""

    def __init__(self, directory: Path | str, *, files: Files = FILES) -> None:
        self.path = Path(directory)
        self.files = files
        self._open: dict[str, Stored] = {}
        self._fd = -1
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            raise NotFoundError(
                f"{self.path} is no checkpoint: there is no such directory",
                fix="give a step-… directory, or a step that `argosy checkpoint ls` shows",
            )
        try:
            self.manifest_bytes = _read_manifest(self.path, self._fd, files)
            self.manifest: Manifest = manifests.decode(self.manifest_bytes, f"{self.path.name}")
        except BaseException:
            self.close()
            raise

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.manifest.step

    def names(self) -> list[str]:
        """Of all tensors, aliases too."""
        return [*self.manifest.tensors, *self.manifest.aliases]

    def record(self, name: str) -> TensorRecord:
        """What the manifest says of a tensor; the nearest name in the error when there is none."""
        found = self.manifest.tensors.get(self.manifest.aliases.get(name, name))
        if found is None:
            near = nearest(name, self.names())
            raise NotFoundError(
                f"{self.path.name} has no tensor {name!r}",
                fix=f"did you mean {near!r}?" if near else "see its names()",
            )
        return found

    def trees(self) -> dict[str, Any]:
        """Everything that is no tensor, by the key it was saved under, as trees."""
        if self.manifest.values is None:
            return {}
        stored = self.stored(self.manifest.values)
        if stored.size > names.MOST_VALUES_BYTES:
            raise CheckpointDamaged(f"{stored.name} has {stored.size} bytes: more than allowed")
        data = fetches.read_bytes(stored, 0, stored.size, files=self.files)
        return trees.read(data, f"{stored.name} of {self.path.name}")

    def stored(self, name: str) -> Stored:
        """A file, open and of the right size."""
        found = self._open.get(name)
        if found is None:
            record = self.manifest.files[name]
            with self.directory_of(name) as (directory, file):
                descriptor, is_direct = directio.open_data(
                    self.files, file, directory, record.size, self.path.name
                )
            found = self._open[name] = Stored(
                name=name,
                descriptor=descriptor,
                size=record.size,
                chunk_bytes=record.chunk_bytes,
                table=tables.unpack(record.crc32c, name),
                is_direct=is_direct,
                checkpoint=self.path.name,
            )
        return found

    @contextmanager
    def directory_of(self, name: str) -> Iterator[tuple[int, str]]:
        """Where a file of the checkpoint lies: a descriptor that is open within, and the name there."""
        record = self.manifest.files[name]
        if record.stored == "here" or record.origin is None:
            yield self._fd, name
            return
        other = self.path.absolute().parent / names.step_name(record.origin.step)
        try:
            directory = os.open(other, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            raise CheckpointDamaged(
                f"{self.path.name} refers to {other.name}, which is gone",
                fix="use another checkpoint",
            )
        try:
            yield directory, record.origin.file
        finally:
            os.close(directory)

    @contextmanager
    def naming_tensors(self) -> Iterator[None]:
        """Within it a damaged chunk's error says which tensors lie in it."""
        try:
            yield
        except DamagedChunk as failure:
            inside = self.tensors_in(failure.file, failure.start, failure.stop)
            whose = ", ".join(inside[:5]) + (f" and {len(inside) - 5} more" if inside[5:] else "")
            raise CheckpointDamaged(
                f"{failure.what}; in them: {whose or 'no tensor, but the header'}", fix=failure.fix
            )

    def tensors_in(self, file: str, start: int, stop: int) -> list[str]:
        """Names of the tensors of which a stretch of a file has bytes."""
        return [
            name
            for name, record in self.manifest.tensors.items()
            for part in record.parts
            if part.file == file
            and part.offset < stop
            and part.offset + record.bytes_of(part) > start
        ]

    def close(self) -> None:
        """Give the descriptors back."""
        for one in self._open.values():
            os.close(one.descriptor)
        self._open.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def _read_manifest(path: Path, directory: int, files: Files) -> bytes:
    try:
        descriptor = files.open(names.MANIFEST, os.O_RDONLY, directory)
    except OSError:
        raise CheckpointDamaged(
            f"{path} has no {names.MANIFEST}: it is no checkpoint, or was not copied whole",
            fix="use another checkpoint",
        )
    try:
        size = os.fstat(descriptor).st_size
        if size > names.MOST_MANIFEST_BYTES:
            raise CheckpointDamaged(f"{path / names.MANIFEST} has {size} bytes: more than allowed")
        data = bytearray(size)
        done = 0
        while done < size:
            count = files.read(descriptor, memoryview(data)[done:], done)
            if count <= 0:
                break
            done += count
        return bytes(data[:done])
    except OSError as failure:
        raise directio.disk_error(failure, f"{path / names.MANIFEST} cannot be read")
    finally:
        os.close(descriptor)
