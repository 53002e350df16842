"""An open checkpoint: its manifest, its values, and tensors of which only what is asked for is read.

`Opened(directory)` reads and validates the manifest and nothing else. Files are opened when first needed, without following links, and their sizes
compared. The loader, the verification and people who look into a checkpoint use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint import bands, directio, manifests, names, reads, tables, trees
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.headers import FROM_FILE
from argosy.checkpoint.manifests import Manifest, TensorRecord
from argosy.checkpoint.reads import DamagedChunk, Request, Stored
from argosy.config.nearest import nearest
from argosy.errors import CheckpointDamaged, NotFoundError
from argosy.move.boxes import Box, Held, row_major
from argosy.move.placements import dtype_of


class Opened:
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

    def tensor(self, name: str) -> Lazy:
        """A tensor of which slices are read."""
        return Lazy(self, name, self.record(name))

    def trees(self) -> dict[str, Any]:
        """Everything that is no tensor, by the key it was saved under, as trees."""
        if self.manifest.values is None:
            return {}
        stored = self.stored(self.manifest.values)
        if stored.size > names.MOST_VALUES_BYTES:
            raise CheckpointDamaged(f"{stored.name} has {stored.size} bytes: more than allowed")
        data = reads.read_bytes(stored, 0, stored.size, files=self.files)
        return trees.read(data, f"{stored.name} of {self.path.name}")

    def value(self, key: str) -> Any:
        """One value with its tensors and bytes."""
        found = self.trees()
        if key not in found:
            near = nearest(key, list(found))
            raise NotFoundError(
                f"{self.path.name} has no value {key!r}",
                fix=f"did you mean {near!r}?" if near else "see its trees()",
            )

        def fetch(word: str, name: str) -> Any:
            tensor = self.tensor(name).read()
            return tensor.numpy().tobytes() if word == "$bytes" else tensor

        return trees.decode(found[key], fetch)

    def stored(self, name: str) -> Stored:
        """A file, open and of the right size."""
        found = self._open.get(name)
        if found is None:
            record = self.manifest.files[name]
            with self._directory_of(name) as (directory, file):
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
    def _directory_of(self, name: str) -> Iterator[tuple[int, str]]:
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

    def requests(self, name: str, held: Held, buffer: torch.Tensor) -> list[tuple[str, Request]]:
        """Reads that fill a held box of a tensor's destination: (file, request), one per part that it meets."""
        record = self.record(name)
        dtype = dtype_of(FROM_FILE[record.dtype])
        found = []
        for part in record.parts:
            whole = record.box_of(part)
            cut = held.box.intersect(whole)
            if cut is None:
                continue
            inner = Box(tuple(map(int.__sub__, cut.offsets, whole.offsets)), cut.sizes)
            cells = None
            if part.bands is not None:
                grid = bands.stored_grid(whole.sizes, dtype.itemsize, part.bands, name)
                cells = grid, tables.unpack(part.bands.crc32c, name)
            request = Request(
                tensor=name,
                offset=part.offset,
                shape=whole.sizes,
                dtype=dtype,
                box=inner,
                held=Held(inner, held.at(cut.offsets), held.strides, held.buffer),
                buffer=buffer,
                cells=cells,
            )
            found.append((part.file, request))
        return found

    def close(self) -> None:
        """Give the descriptors back."""
        for one in self._open.values():
            os.close(one.descriptor)
        self._open.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class Lazy:
    """A stored tensor; indexing reads only the stretches that are needed."""

    def __init__(self, opened: Opened, name: str, record: TensorRecord) -> None:
        self._opened = opened
        self._record = record
        self.name = name
        self.dtype = dtype_of(record.meaning or FROM_FILE[record.dtype])
        self.shape = torch.Size(record.shape[:-1] if record.meaning else record.shape)
        self.statistics = reads.Statistics()

    def __repr__(self) -> str:
        return f"<stored tensor {self.name!r}, {self.dtype}, {tuple(self.shape)}>"

    def __getitem__(self, index: Any) -> torch.Tensor:
        box, rest = _box_of_index(index, tuple(self.shape), self.name)
        found = self.read_box(box)
        return found[rest] if rest else found

    def read(self) -> torch.Tensor:
        """All of it."""
        return self.read_box(Box((0,) * len(self.shape), tuple(self.shape)))

    def read_box(self, box: Box) -> torch.Tensor:
        """A box of it, as a tensor of its own."""
        if self._record.meaning is not None:
            box = Box((*box.offsets, 0), (*box.sizes, 2))
        found = torch.empty(box.sizes, dtype=dtype_of(FROM_FILE[self._record.dtype]))
        if box.volume:
            held = Held(box, 0, row_major(box.sizes))
            work: dict[str, list[Request]] = {}
            for file, request in self._opened.requests(self.name, held, found):
                work.setdefault(file, []).append(request)
            with self._opened.naming_tensors():
                self.statistics = reads.read(
                    [(self._opened.stored(file), wanted) for file, wanted in work.items()],
                    files=self._opened.files,
                )
        return torch.view_as_complex(found) if self._record.meaning is not None else found


def _box_of_index(index: Any, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[Any, ...]]:
    """The box that basic indexing touches, and what is left to index in it."""
    given = list(index) if isinstance(index, tuple) else [index]
    if sum(one is Ellipsis for one in given) > 1 or len(given) - (Ellipsis in given) > len(shape):
        raise IndexError(f"{name} has {len(shape)} dims, {index!r} has too many")
    if Ellipsis in given:
        at = given.index(Ellipsis)
        given[at : at + 1] = [slice(None)] * (len(shape) - len(given) + 1)
    given += [slice(None)] * (len(shape) - len(given))
    offsets, sizes = [], []
    rest: list[Any] = []
    for one, size in zip(given, shape, strict=True):
        if isinstance(one, slice):
            start, stop, step = one.indices(size)
            if step < 1:
                raise IndexError(f"{name}[{index!r}]: slices go forward")
            extent = max(0, stop - start)
            offsets.append(start)
            sizes.append(extent)
            rest.append(slice(None, None, step))
        elif isinstance(one, int) and -size <= one < size:
            offsets.append(one % size)
            sizes.append(1)
            rest.append(0)
        else:
            raise IndexError(f"{name} has shape {shape}: {index!r} is no basic index of it")
    return Box(tuple(offsets), tuple(sizes)), tuple(rest)


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
