"""Modules in a checkpoint: parameters and persistent buffers under their own names, whatever they are wrapped in.

The module under `model` keeps its plain names, so that other programs read its weights. Ties are aliases; what a module gives as extra state is a value.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from argosy.checkpoint import trees
from argosy.checkpoint.books import Book, decoded
from argosy.checkpoint.captures import Later, NotTaken, Taken
from argosy.checkpoint.names import Kind
from argosy.checkpoint.opened import Opened
from argosy.move.placements import Pieces

MODEL = "model"
"""The key whose module keeps its plain names."""


class ModuleState:
    """Parameters and persistent buffers of a module."""

    def __init__(self, key: str, module: torch.nn.Module) -> None:
        self._key = key
        self._prefix = "" if key == MODEL else f"{key}/"
        self._module = unwrapped(module)
        self._extra: Any = None

    def take(self, taken: Taken) -> Later:
        """The same tensors without asking the modules, where none makes state of its own."""
        found: list[tuple[str, torch.Tensor, Kind]] = []
        find_plain(self._module, self._prefix, found)
        taken.tensors([value for _, value, _ in found])

        def write(book: Book) -> None:
            for name, value, kind in found:
                book.add(name, value, kind)
                if isinstance(value, torch.nn.Parameter):
                    book.parameters.setdefault(id(value), name)

        return write

    def gather(self, book: Book) -> None:
        """Everything of state_dict(), under the module's own names."""
        extra: dict[str, Any] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            if isinstance(value, (torch.Tensor, Pieces)):
                book.add(self._prefix + name, value, kind_of(value))
            else:
                path = f"{self._key}/{name}"
                extra[name] = trees.encode(value, book.store, path)
        if extra:
            book.values[self._key] = extra
        self._name_parameters(book)

    def prepare(self, book: Book, opened: Opened, tree: Any) -> None:
        """Its tensors are filled where they are."""
        for name, value in self._module.state_dict(keep_vars=True).items():
            if isinstance(value, (torch.Tensor, Pieces)):
                book.add(self._prefix + name, value, kind_of(value), is_destination=True)
        if tree:
            self._extra = {name: decoded(one, book, opened) for name, one in tree.items()}
        self._name_parameters(book)

    def finish(self) -> Any:
        """Extra state goes back to the modules that keep some."""
        if self._extra:
            for name, value in self._extra.items():
                owner, _, _ = name.rpartition(".")
                self._module.get_submodule(owner).set_extra_state(value)
        return self._module

    def _name_parameters(self, book: Book) -> None:
        for name, parameter in self._module.named_parameters():
            book.parameters.setdefault(id(parameter), self._prefix + name)


def find_plain(
    module: torch.nn.Module, prefix: str, found: list[tuple[str, torch.Tensor, Kind]]
) -> None:
    """What state_dict() gives, in its order and many times faster; NotTaken where a module has a say in that."""
    # Attributes of a module are looked for in several places; this is where these are.
    own = module.__dict__
    if (
        not _is_plain(type(module))  # type: ignore[arg-type]
        or own["_state_dict_hooks"]
        or own["_state_dict_pre_hooks"]
        or "state_dict" in own
    ):
        raise NotTaken
    for name, parameter in own["_parameters"].items():
        if parameter is not None:
            kind: Kind = "model" if parameter.requires_grad else "frozen"
            found.append((prefix + name, parameter, kind))
    for name, buffer in own["_buffers"].items():
        if buffer is not None and name not in own["_non_persistent_buffers_set"]:
            found.append((prefix + name, buffer, "model"))
    for name, child in own["_modules"].items():
        if child is not None:
            find_plain(child, f"{prefix}{name}.", found)


@cache
def _is_plain(kind: type) -> bool:
    """Whether modules of a class leave their state to torch."""
    methods = ("state_dict", "_save_to_state_dict", "get_extra_state")
    return all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in methods)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside data parallel and compiled ones: names must not depend on them."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif module._modules.get("_orig_mod") is not None:
            module = module._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return module


def kind_of(value: torch.Tensor | Pieces) -> Kind:
    """The class of a tensor of a module."""
    is_frozen = isinstance(value, torch.nn.Parameter) and not value.requires_grad
    return "frozen" if is_frozen else "model"
