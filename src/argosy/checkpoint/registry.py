"""The state registry: what a user calls his state, as named tensors with boxes and classes, and as values; and back again.

Knows modules, optimizers, random streams, whatever has a state_dict, tensors, bytes and JSON. Ties become aliases, views are saved as what they show,
non-persistent buffers are left out. It reads metadata and fills what is no tensor; bytes of tensors are moved by the gatherer and the loader.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from argosy.checkpoint import streams, trees
from argosy.checkpoint.books import Book, Part, decoded, room_in
from argosy.checkpoint.captures import Later, Leaves, Taken
from argosy.checkpoint.modules import ModuleState
from argosy.checkpoint.names import VALUES
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.optimizers import OptimizerState
from argosy.checkpoint.trees import ValuesUnfit
from argosy.errors import ConfigError, MismatchError
from argosy.move.placements import Pieces

_LOG = logging.getLogger("argosy.checkpoint")
STREAMS = "streams"
"""The key of the process's own random streams."""


class PerRank:
    """A value that differs from rank to rank: each saves its own, and gets its own back."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TreeState:
    """A value of JSON, bytes and tensors, or what an object's state_dict gives."""

    is_value = True
    """Whether a checkpoint that has nothing under its key lacks it."""

    def __init__(self, key: str, value: Any, *, is_per_rank: bool = False) -> None:
        self._key = key
        self._value = value
        self._is_per_rank = is_per_rank
        self._loaded: Any = None

    def gather(self, book: Book) -> None:
        """Encoded; tensors in it are entries of class `extra`."""
        tree = trees.encode(_state_of(self._value), book.store, self._path(book.rank))
        self._values(book)[self._key] = tree

    def take(self, taken: Taken) -> Later:
        """Encoded now; tensors are set aside."""
        leaves = Leaves(taken)
        tree = trees.encode(_state_of(self._value), leaves.note, self._path(taken.rank))

        def write(book: Book) -> None:
            self._values(book)[self._key] = leaves.give(book, tree)

        return write

    def prepare(self, book: Book, opened: Opened, tree: Any) -> None:
        """Decoded; tensors that are there already are filled where they are, in whatever layout."""
        if self._is_per_rank:
            tree = self._own_of(tree, book.rank, opened)
        if isinstance(self._value, (torch.Tensor, Pieces, np.ndarray)):
            if tree is not None:
                book.add_stored(self._name_in(tree), self._room(), "extra")
            self._loaded = self._value
            return
        existing = _tensors_in(self._value, self._path(book.rank), opened)
        self._loaded = decoded(tree, book, opened, existing)

    def finish(self) -> Any:
        """Given to the object, or put into the container."""
        value, loaded = self._value, self._loaded
        if loaded is None or value is loaded:
            return loaded
        if _has_state(value):
            _give_state(self._key, value, loaded)
        elif isinstance(value, MutableMapping) and isinstance(loaded, Mapping):
            value.clear()
            value.update(loaded)
        elif isinstance(value, MutableSequence) and isinstance(loaded, list):
            value[:] = loaded
        return loaded

    def _room(self) -> torch.Tensor | Pieces:
        room = room_in(self._value)
        if room is None:
            raise ConfigError(
                f"the array under {self._key!r} cannot be filled",
                fix="give one that is writable and in this machine's order of bytes",
            )
        return room

    def _name_in(self, tree: Any) -> str:
        """Under which a tensor or an array was saved."""
        if isinstance(tree, dict) and len(tree) == 1:
            ((word, name),) = tree.items()
            if word in ("$tensor", "$array") and isinstance(name, str):
                return name
        raise MismatchError(
            f"{self._key!r} is a tensor in the state, and none in the checkpoint",
            fix="load it under another key, or without it",
        )

    def _own_of(self, tree: Any, rank: int, opened: Opened) -> Any:
        name = f"rank-{rank:05d}"
        if tree is not None and not isinstance(tree, dict):
            raise ValuesUnfit(
                f"{VALUES} of {opened.path.name} makes no sense under {self._key!r}",
                fix="use another checkpoint",
            )
        if tree and name not in tree:
            _LOG.warning(
                "%s was saved by a world of %d: rank %d has nothing under %r and keeps what it has",
                opened.path.name,
                len(tree),
                rank,
                self._key,
            )
        return (tree or {}).get(name)

    def _path(self, rank: int) -> str:
        return f"{self._key}/rank-{rank:05d}" if self._is_per_rank else self._key

    def _values(self, book: Book) -> dict[str, Any]:
        return book.own_values if self._is_per_rank else book.values


_NO_STATE = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)
"""What random streams raise over a state that is none of theirs."""


class StreamsState(TreeState):
    """The process's own random streams."""

    is_value = False
    """Those of another program, or of a save without them, are not missed."""

    def __init__(self) -> None:
        super().__init__(STREAMS, streams.Process(), is_per_rank=True)

    def finish(self) -> Any:
        """Given back; those that make no sense are no fault of whoever loads them."""
        try:
            return super().finish()
        except _NO_STATE as failure:
            raise ValuesUnfit(
                f"the random streams that were saved make no sense: {failure}",
                fix="load with streams=False, or another checkpoint",
            )

    def take(self, taken: Taken) -> Later:
        """Their states are copies already: they are encoded later."""
        states, path = streams.now(), self._path(taken.rank)

        def write(book: Book) -> None:
            tree = trees.encode(streams.described(states), book.store, path)
            self._values(book)[STREAMS] = tree

        return write


def check_state(state: object) -> None:
    """ConfigError when it has no keys."""
    if not isinstance(state, Mapping) or not state:
        what = "empty" if isinstance(state, Mapping) else f"a {type(state).__name__}, not a dict"
        raise ConfigError(
            f"the state is {what}",
            fix='give {"model": model, "optimizer": optimizer, …}',
        )


def _is_plain(key: object) -> bool:
    return isinstance(key, str) and bool(key) and "/" not in key and key != STREAMS


def parts_of(state: Mapping[str, Any], *, with_streams: bool = True) -> dict[str, Part]:
    """The state's keys as parts, modules first: optimizers ask for their parameters' names."""
    check_state(state)
    found: dict[str, Part] = {}
    later: dict[str, Part] = {}
    for key, value in state.items():
        if not _is_plain(key):
            fix = "use plain names without a /"
            if key == STREAMS:
                fix = "use another: the process's own random streams are saved under it"
            raise ConfigError(f"the key {key!r} cannot be used", fix=fix)
        if isinstance(value, torch.nn.Module):
            found[key] = ModuleState(key, value)
        elif isinstance(value, torch.optim.Optimizer):
            later[key] = OptimizerState(key, value)
        elif isinstance(value, Part):
            later[key] = value
        elif isinstance(value, PerRank):
            later[key] = TreeState(key, value.value, is_per_rank=True)
        else:
            later[key] = TreeState(key, value)
    found |= later
    if with_streams:
        found[STREAMS] = StreamsState()
    return found


def _tensors_in(
    value: Any, path: str, opened: Opened
) -> dict[str, torch.Tensor | Pieces | npt.NDArray[Any]]:
    """The tensors and arrays that a value holds now, by the names they would be saved under: those that can be filled.

    What is empty may be given another shape, and so may what belongs to an object, which says itself what it takes.
    """
    found: dict[str, torch.Tensor | Pieces | npt.NDArray[Any]] = {}
    is_object, stored = _has_state(value), set(opened.names())

    def store(at: str, leaf: Any) -> dict[str, Any]:
        if isinstance(leaf, (torch.Tensor, Pieces, np.ndarray)):
            is_free = (is_object or 0 in leaf.shape) and at in stored
            if not is_free or tuple(opened.tensor(at).shape) == tuple(leaf.shape):
                found[at] = leaf
        return {}

    if not isinstance(value, (torch.Generator, np.random.Generator, random.Random)):
        trees.encode(_state_of(value), store, path)
    return found


def _has_state(value: Any) -> bool:
    is_object = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return is_object or isinstance(value, (torch.Generator, np.random.Generator, random.Random))


def _state_of(value: Any) -> Any:
    if isinstance(value, (torch.Generator, np.random.Generator, random.Random)):
        return streams.state_of(value)
    return value.state_dict() if _has_state(value) else value


def _give_state(key: str, value: Any, loaded: Any) -> None:
    if not isinstance(value, (torch.Generator, np.random.Generator, random.Random)):
        value.load_state_dict(loaded)
        return
    try:
        streams.give_state(value, loaded)
    except _NO_STATE as failure:
        raise MismatchError(
            f"what was saved under {key!r} is no state of this generator: {failure}",
            fix="give one of the kind that was saved",
        )
