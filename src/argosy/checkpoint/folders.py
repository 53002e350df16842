"""A committed checkpoint: its manifest, its files, open and of the right size, and its values. No torch.

`Folder(directory)` reads and validates the manifest and nothing else. Files are opened when first needed. The command line and the verification need
no more; `Opened` adds tensors. Where the files lie is the business of places.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from argosy.checkpoint import fetches, manifests, names, tables, trees
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.fetches import DamagedChunk, Stored
from argosy.checkpoint.manifests import Manifest, TensorRecord
from argosy.checkpoint.places import Directory, Place
from argosy.config.nearest import nearest
from argosy.errors import CheckpointDamaged, NotFoundError


class Folder:
    """One checkpoint, opened for reading; a context manager."""

    def __init__(
        self, place: Place | Path | str, *, files: Files = FILES, known_crc: int | None = None
    ) -> None:
        """`known_crc`: of a manifest that this process, or one it works for, has written or checked before; its tensors are not looked at again."""
        self._open: dict[str, Stored] = {}
        self._is_closed = True
        self.place: Place = (
            Directory(Path(place), files) if isinstance(place, (str, Path)) else place
        )
        self._is_closed = False
        self.path = self.place.path
        self.files = self.place.files
        try:
            self.manifest_bytes = self.place.read_manifest()
            self.manifest: Manifest = manifests.decode(
                self.manifest_bytes, f"{self.path.name}", known_crc=known_crc
            )
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

    def check_values(self) -> None:
        """Everything that is no tensor can be decoded, and names tensors that are there; CheckpointDamaged otherwise."""
        trees.decode(self.trees(), self.check_leaf)

    def check_leaf(self, word: str, name: str) -> None:
        """What stands for a tensor names one that is there."""
        if self.manifest.aliases.get(name, name) not in self.manifest.tensors:
            raise CheckpointDamaged(f"{names.VALUES} has {word} {name!r}, which is not there")

    def stored(self, name: str) -> Stored:
        """A file, open and of the right size."""
        found = self._open.get(name)
        if found is None:
            record = self.manifest.files[name]
            descriptor, is_direct = self.place.open(name, record)
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

    def check_files(self) -> None:
        """All of them are there, with the right size; CheckpointDamaged names one that is not. Nothing of them is read."""
        for name, record in self.manifest.files.items():
            descriptor, _ = self.place.open(name, record)
            self.place.give_back(descriptor)

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
            self.place.give_back(one.descriptor)
        self._open.clear()
        if not self._is_closed:
            self._is_closed = True
            self.place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self.close()
