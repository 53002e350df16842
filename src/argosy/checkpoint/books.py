"""What a save or a load has found so far: entries, aliases, values, and names of parameters; and what every part of a state can do.

The registry hands one book to the parts of a state in turn. Reads metadata only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from argosy.checkpoint import trees
from argosy.checkpoint.entries import Entry, entry_of
from argosy.checkpoint.guards import SnapshotTorn
from argosy.checkpoint.names import Kind
from argosy.checkpoint.opened import Opened
from argosy.errors import ConfigError, MismatchError
from argosy.move.placements import Pieces, local_of

Place = tuple[Any, ...]
_DTYPES = {
    np.dtype(one)
    for one in ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16")
}
"""Of arrays that are kept as tensors."""


class Aside(NamedTuple):
    """A tensor that may change at once, as it was in the call of a save."""

    original: torch.Tensor
    """Kept, as it is found by its identity."""
    copy: torch.Tensor
    place: Place | None


class Book:
    """What a save or a load has found so far."""

    def __init__(
        self,
        rank: int = 0,
        *,
        aside: Mapping[int, Aside] | None = None,
        addresses: Mapping[int, int] | None = None,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        """Of a state that was captured: what was set aside and where the rest was, by the identity of tensors. Of a load: what the checkpoint calls a tensor of the state."""
        self.rank = rank
        self._rename = rename
        self._stored: dict[str, str] = {}
        self._aside = aside or {}
        self._addresses = addresses or {}
        self.entries: list[Entry] = []
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        """Trees by key, the same on all ranks."""
        self.own_values: dict[str, Any] = {}
        """Trees by key that each rank has for itself."""
        self.read: set[str] = set()
        """Names of tensors that were read before the rest."""
        self.parameters: dict[int, str] = {}
        """Names of parameters by identity, for optimizers."""
        self._places: dict[tuple[Any, ...], str] = {}
        self._names: set[str] = set()

    def stored_name(self, name: str) -> str:
        """What the checkpoint calls a tensor of the state."""
        if name in self._stored:
            return self._stored[name]
        return name if self._rename is None else self._rename(name)

    def add_stored(
        self, name: str, value: torch.Tensor | Pieces, kind: Kind, stored: str = ""
    ) -> None:
        """Room for a tensor of which the checkpoint has said what it calls it: rules of renaming are not asked."""
        self._stored[name] = stored or name
        self.add(name, value, kind, is_destination=True)

    def add(
        self, name: str, value: torch.Tensor | Pieces, kind: Kind, *, is_destination: bool = False
    ) -> None:
        """A tensor; one that is the very memory of another becomes its alias."""
        if not is_destination:
            self._claim(name)
            if isinstance(value, torch.Tensor) and value.is_nested:
                raise ConfigError(
                    f"{name} is a nested tensor, which a checkpoint cannot hold",
                    fix="save its values() and offsets()",
                )
        aside = self._aside.get(id(value))
        place = place_of(value) if aside is None else aside.place
        if place is not None:
            first = self._places.setdefault(place, name)
            if first != name:
                self.aliases[name] = first
                return
        source = value if aside is None else aside.copy
        entry = entry_of(name, source, kind, is_destination=is_destination)
        if self._addresses.get(id(value), entry.address) != entry.address:
            raise SnapshotTorn(
                f"{name} was given other memory before its snapshot was taken",
                fix='wait for the save with handle.wait("staged") before that',
            )
        self.entries.append(entry)

    def _claim(self, name: str) -> None:
        if name in self._names:
            raise MismatchError(
                f"the state has two tensors of the name {name}",
                fix="give one of them another key: a module under `model` has its plain names",
            )
        self._names.add(name)

    def store(self, path: str, value: Any, kind: Kind = "extra") -> dict[str, Any] | None:
        """A leaf of a tree that is kept as a tensor."""
        if isinstance(value, (torch.Tensor, Pieces)):
            self.add(path, value, kind)
            return {"$tensor": self.aliases.get(path, path)}
        if is_array(value):
            self.add(path, torch.from_numpy(_native(value)), kind)
            return {"$array": self.aliases.get(path, path)}
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = np.frombuffer(bytes(value), dtype=np.uint8).copy()
            self.add(path, torch.from_numpy(data), kind)
            return {"$bytes": path}
        return None


@runtime_checkable
class Part(Protocol):
    """One key of the state."""

    def gather(self, book: Book) -> None:
        """Say what there is to save."""

    def prepare(self, book: Book, opened: Opened, tree: Any) -> None:
        """Say what is to be filled, making room where there is none yet."""

    def finish(self) -> Any:
        """Take over what has been read; what the caller gets to see of it."""


def decoded(
    tree: Any,
    book: Book,
    opened: Opened,
    existing: Mapping[str, torch.Tensor | Pieces | npt.NDArray[Any]] | None = None,
) -> Any:
    """A tree's value with its tensors and arrays: those that exist are filled where they are, others get room. Bytes are read at once."""
    known = existing or {}

    def fetch(word: str, name: str) -> Any:
        opened.check_leaf(word, name)
        if word == "$bytes":
            book.read.add(name)
            return opened.tensor(name).read().numpy().tobytes()
        own = known.get(name)
        room = room_in(own) if own is not None else None
        if room is None:
            lazy = opened.tensor(name)
            room = torch.empty(lazy.shape, dtype=lazy.dtype)
            own = room.numpy() if word == "$array" else room
        book.add_stored(name, room, opened.record(name).kind)
        return own

    return trees.decode(tree, fetch)


def room_in(value: torch.Tensor | Pieces | npt.NDArray[Any]) -> torch.Tensor | Pieces | None:
    """The same memory as a tensor, to be filled; None of an array that torch cannot have."""
    if not isinstance(value, np.ndarray):
        return value
    try:
        return torch.from_numpy(value) if value.flags.writeable else None
    except (TypeError, ValueError):
        return None


def is_array(value: Any) -> bool:
    """Whether it is an array that torch can have as it is; of other kinds something would be lost, like a mask."""
    is_plain = type(value) in (np.ndarray, np.memmap)
    return is_plain and value.dtype.kind in "buifc" and value.dtype.newbyteorder("=") in _DTYPES


def _native(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """As torch can have it: in this machine's order of bytes, without gaps."""
    return np.asarray(value, dtype=value.dtype.newbyteorder("="), order="C")


def place_of(value: torch.Tensor | Pieces) -> Place | None:
    """Equal for tensors that are the same elements of the same memory."""
    if isinstance(value, Pieces) or not value.numel() or value.layout != torch.strided:
        return None
    local = local_of(value)
    if not local.numel() or local.is_meta:
        return None
    return local.data_ptr(), local.dtype, local.shape, local.stride(), value.shape, local.device
