"""Optimizers in a checkpoint: state by the parameters' true names, so that it finds its parameters in any order, group and layout.

Tensors are entries of class `optimizer`; numbers and the groups' settings are values. On the way back, state that does not exist yet is made in
the layout of its parameter. Works with any torch optimizer whose state is tensors and plain values.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from argosy.checkpoint import names, trees
from argosy.checkpoint.books import Book, decoded
from argosy.checkpoint.captures import Later, Leaves, NotTaken, Taken
from argosy.checkpoint.guards import Members, members_of
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.trees import ValuesUnfit
from argosy.errors import ConfigError, MismatchError
from argosy.move.placements import buffers, is_dtensor, like

_LOG = logging.getLogger("argosy.checkpoint")


class OptimizerState:
    """One optimizer under one key."""

    def __init__(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        self._key = key
        self._optimizer = optimizer
        self._loaded: dict[torch.Tensor, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []

    def gather(self, book: Book) -> None:
        """`key/parameter/member` for tensors, the rest in the tree."""
        settings = [
            trees.encode(settings_of(group), book.store, f"{self._key}/group-{place}")
            for place, group in enumerate(self._optimizer.param_groups)
        ]
        self._write(book, settings, members_of(self._optimizer))

    def take(self, taken: Taken) -> Later:
        """Settings as they are now: a scheduler may change them before the next step."""
        leaves = Leaves(taken)
        settings = [
            trees.encode(settings_of(group), leaves.note, f"{self._key}/group-{place}")
            for place, group in enumerate(self._optimizer.param_groups)
        ]
        if not taken.guards.kinds <= _SIMPLE:
            raise NotTaken
        members = taken.guards.members(self._optimizer)
        return lambda book: self._write(book, leaves.give(book, settings), members)

    def _write(self, book: Book, settings: list[dict[str, Any]], members: list[Members]) -> None:
        groups, numbers, tensors = [], {}, {}
        for place, group in enumerate(members):
            own = self._names(book, place, [parameter for parameter, _ in group])
            groups.append({**settings[place], "parameters": own})
            for name, (_, state) in zip(own, group, strict=True):
                if not state:
                    continue
                kept, plain = [], {}
                for member, value in state.items():
                    path = f"{self._key}/{name}/{member}"
                    if isinstance(value, torch.Tensor):
                        book.add(path, value, "optimizer")
                        kept.append(member)
                    else:
                        plain[member] = trees.encode(value, book.store, path)
                tensors[name] = kept
                if plain:
                    numbers[name] = plain
        book.values[self._key] = {"groups": groups, "state": numbers, "tensors": tensors}

    def prepare(self, book: Book, opened: Opened, tree: Any) -> None:
        """Room for every tensor that the checkpoint has for a parameter that is here."""
        if not isinstance(tree, dict) or not tree.keys() >= _TREE:
            raise MismatchError(
                f"{opened.path.name} has no optimizer under {self._key!r}",
                fix=f"save under the same keys, or leave the optimizer out of the load; one that was imported without names: open(step).value({self._key!r})",
            )
        if not _is_whole(tree):
            raise ValuesUnfit(
                f"{names.VALUES} of {opened.path.name} makes no sense under {self._key!r}",
                fix="use another checkpoint",
            )
        members: list[tuple[str, str, torch.Tensor]] = []
        grouped: list[list[str]] = []
        for place, group in enumerate(self._optimizer.param_groups):
            parameters = group["params"]
            own = self._names(book, place, parameters)
            # What is called by its place is so in the checkpoint, too.
            grouped.append(
                [
                    book.stored_name(name) if id(parameter) in book.parameters else name
                    for name, parameter in zip(own, parameters, strict=True)
                ]
            )
            members += zip(own, grouped[-1], parameters, strict=True)
        stored = {name for group in tree["groups"] for name in group["parameters"]}
        odd = sorted(stored ^ {name for _, name, _ in members})
        if odd:
            side = "only in the checkpoint" if odd[0] in stored else "not in the checkpoint"
            raise MismatchError(
                f"the optimizer {self._key!r} differs: {odd[0]!r} is {side}",
                fix="give the optimizer the parameters it was saved with, and load its model with it: their names come from there",
            )
        self._groups = [
            {key: decoded(one, book, opened) for key, one in group.items() if key != "parameters"}
            for group in _matched(self._key, tree["groups"], grouped)
        ]
        self._warn_of_settings(opened)
        for own_name, name, parameter in members:
            self._prepare_one(book, opened, tree, (own_name, name), parameter)

    def _warn_of_settings(self, opened: Opened) -> None:
        """Torch takes the state of any optimizer for that of any other. Schedulers add settings, and so do newer versions: only both together tell."""
        own = {name for group in self._optimizer.param_groups for name in group}
        there = {name for group in self._groups for name in group}
        odd = sorted(there - own)
        if odd and self._optimizer.defaults.keys() - there:
            _LOG.warning(
                "%s: the optimizer %r was saved with %s, which %s does not have: is it of another kind?",
                opened.path.name,
                self._key,
                ", ".join(odd),
                type(self._optimizer).__name__,
            )

    def _prepare_one(
        self,
        book: Book,
        opened: Opened,
        tree: Any,
        called: tuple[str, str],
        parameter: torch.Tensor,
    ) -> None:
        """Of a parameter, by its names here and in the checkpoint."""
        own, stored = called
        state: dict[str, Any] = {}
        now = self._optimizer.state.get(parameter, {})
        for member in tree["tensors"].get(stored, ()):
            path = f"{self._key}/{stored}/{member}"
            lazy = opened.tensor(path)
            here = now.get(member)
            if not isinstance(here, torch.Tensor) or here.shape != lazy.shape:
                here = _room(lazy.shape, lazy.dtype, parameter)
            book.add_stored(f"{self._key}/{own}/{member}", here, "optimizer", path)
            state[member] = here
        for member, one in tree["state"].get(stored, {}).items():
            state[member] = decoded(one, book, opened)
        self._loaded[parameter] = state

    def finish(self) -> Any:
        """State and settings as they were saved."""
        for parameter, state in self._loaded.items():
            if state:
                self._optimizer.state[parameter] = state
            else:
                self._optimizer.state.pop(parameter, None)
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(settings)
        return self._optimizer

    def _names(self, book: Book, place: int, parameters: list[torch.Tensor]) -> list[str]:
        """The model's names; a parameter of no saved model is called by its place."""
        found = [
            book.parameters.get(id(parameter), f"group-{place}.{index}")
            for index, parameter in enumerate(parameters)
        ]
        if len(set(found)) != len(found):
            raise ConfigError(
                f"the optimizer {self._key!r} has a parameter twice in group {place}",
                fix="give each parameter once",
            )
        return found


_TREE = {"groups", "state", "tensors"}
"""What the tree of an optimizer has; one that was imported without names of parameters is a plain value."""


def _is_whole(tree: dict[str, Any]) -> bool:
    """Whether the tree of an optimizer can be what was written."""
    groups, tensors, state = tree["groups"], tree["tensors"], tree["state"]
    return (
        isinstance(groups, list)
        and all(isinstance(one, dict) and _are_texts(one.get("parameters")) for one in groups)
        and isinstance(tensors, dict)
        and all(map(_are_texts, tensors.values()))
        and isinstance(state, dict)
        and all(isinstance(one, dict) for one in state.values())
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


STRUCTURE = ("params", "param_names")
"""Keys of a parameter group that are no settings."""
_SIMPLE = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """All of a parameter group but its parameters."""
    return {name: value for name, value in group.items() if name not in STRUCTURE}


def _matched(
    key: str, stored: list[dict[str, Any]], grouped: list[list[str]]
) -> list[dict[str, Any]]:
    """The stored group of each group that is here: the one with the same parameters, wherever it stands."""
    if len(stored) != len(grouped):
        raise MismatchError(
            f"the checkpoint has {len(stored)} parameter groups, the optimizer {len(grouped)}",
            fix="make the optimizer with the groups it was saved with",
        )
    known = {frozenset(group["parameters"]): group for group in stored}
    for own, there in zip(grouped, stored, strict=True):
        if frozenset(own) not in known:
            odd = min(set(own) ^ set(there["parameters"]))
            raise MismatchError(
                f"the optimizer {key!r} has its parameters in other groups than the checkpoint, first {odd!r}",
                fix="make the optimizer with the groups it was saved with",
            )
    return [known[frozenset(own)] for own in grouped]


def _room(shape: torch.Size, dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
    """Memory for a member: laid out as its parameter when it has its shape."""
    if shape != parameter.shape:
        return torch.zeros(shape, dtype=dtype)
    if is_dtensor(parameter):
        (local,) = buffers(parameter)
        return like(parameter.detach(), torch.zeros_like(local, dtype=dtype))
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
