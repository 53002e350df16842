"""An open checkpoint: its manifest, its values, and tensors of which only what is asked for is read.

A `Folder` with tensors: slices are turned into reads of the stretches that they need. The loader, exports and people who look into a checkpoint
use it.
"""

from __future__ import annotations

from typing import Any

import torch

from argosy.checkpoint import bands, reads, tables, trees
from argosy.checkpoint.fetches import Statistics
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.headers import FROM_FILE
from argosy.checkpoint.manifests import TensorRecord
from argosy.checkpoint.reads import Request
from argosy.config.nearest import nearest
from argosy.errors import NotFoundError
from argosy.move.boxes import Box, Held, row_major
from argosy.move.placements import dtype_of


class Opened(Folder):
    """One checkpoint, opened for reading its tensors; a context manager."""

    def tensor(self, name: str) -> Lazy:
        """A tensor of which slices are read."""
        return Lazy(self, name, self.record(name))

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
            self.check_leaf(word, name)
            tensor = self.tensor(name).read()
            if word == "$tensor":
                return tensor
            return tensor.numpy().tobytes() if word == "$bytes" else tensor.numpy()

        return trees.decode(found[key], fetch)

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


class Lazy:
    """A stored tensor; indexing reads only the stretches that are needed."""

    def __init__(self, opened: Opened, name: str, record: TensorRecord) -> None:
        self._opened = opened
        self._record = record
        self.name = name
        self.dtype = dtype_of(record.meaning or FROM_FILE[record.dtype])
        self.shape = torch.Size(record.shape[:-1] if record.meaning else record.shape)
        self.statistics = Statistics()

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
