"""A version of the training state as a part of a checkpoint, and back again.

Values stand under the model's own names, what optimizers keep under the names that an optimizer saved alone has, so that other programs read the weights and a plain script
goes on from a trainer's checkpoint. Beside them stand the ledger and what must be the same when training goes on. Used by saver.py; reads and fills memory that others have made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from argosy.checkpoint import trees
from argosy.checkpoint.books import Book
from argosy.checkpoint.headers import FROM_FILE
from argosy.checkpoint.modules import kind_of
from argosy.checkpoint.names import Kind
from argosy.checkpoint.opened import Opened
from argosy.data.feeds import find_differences
from argosy.errors import MismatchError
from argosy.train import fingerprint, misfits
from argosy.train.lanes import BUFFER
from argosy.train.memories import IMAGE, Version
from argosy.train.misfits import Form, Outline
from argosy.train.stateplan import AVERAGE, VALUE, Field
from argosy.train.updates import Updater, read_field, write_field

KEY = "trainer"
"""Under which the ledger and the facts stand among a checkpoint's values."""
_OPTIMIZER, _EMA = "optimizer", "ema"
_MOST_SHOWN = 4
"""Differences that a person is told."""


class StoredVersion:
    """One version, to be saved or to be filled."""

    def __init__(
        self,
        version: Version,
        model: torch.nn.Module,
        updaters: Sequence[Updater],
        facts: Mapping[str, Any],
        *,
        ledger: Mapping[str, Any] | None = None,
        allow_drift: bool = False,
    ) -> None:
        """`facts` must be the same when training goes on; `ledger` is saved instead of the version's own."""
        self._version = version
        self._model = model
        self._updaters = updaters
        self._facts = facts
        self._ledger = version.ledger if ledger is None else ledger
        self._allow_drift = allow_drift
        self._owners = {name: updater for updater in updaters for name in updater.names}
        # A tied parameter has several names in the module and one in the version.
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._loaded: Mapping[str, Any] = {}
        self._trees: Mapping[str, Any] = {}

    @property
    def step(self) -> int:
        """Steps that it has behind it."""
        return int(self._ledger["step"])

    @property
    def metrics(self) -> dict[str, float]:
        """Of the step that made it."""
        loss = self._version.result(0).get("loss")
        return {} if loss is None else {"loss": loss}

    # --- out ----------------------------------------------------------------------------------

    def gather(self, book: Book) -> None:
        """Everything that the model has, what optimizers keep, averages, the ledger."""
        version = self._version
        self._add_tensors(book, version.has_begun, is_destination=False)
        if version.image is not None:
            book.add(f"{KEY}/{IMAGE}", version.image, "optimizer")
        book.values |= {_key(updater): self._tree(updater, book) for updater in self._updaters}
        book.values[KEY] = {
            **self._facts,
            "plan": version.plan.digest,
            "begun": [name for name in version.plan.names if version.has_begun(name)],
            "ledger": trees.encode(dict(self._ledger), book.store, KEY),
        }

    def _trained(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """What the version has of a tensor of the module; the module's own where it has none."""
        names = self._version.plan.by_name
        if BUFFER + name in names:
            return self._version.tensor(BUFFER + name)
        known = self._names.get(id(value))
        return self._version.tensor(known) if known in names else value

    def _add_tensors(
        self, book: Book, has_begun: Callable[[str], bool], *, is_destination: bool
    ) -> None:
        """What the model has, averages, and tensors that optimizers keep."""
        for name, value in self._model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                trained = self._trained(name, value)
                book.add(name, trained, kind_of(value), is_destination=is_destination)
        plan = self._version.plan
        for field, tensor in zip(plan.fields, self._version.tensors, strict=True):
            is_average = field.key == AVERAGE
            is_kept = field.key != VALUE and field.kind == "tensor" and has_begun(field.name)
            if is_average or is_kept:
                kind: Kind = "model" if is_average else "optimizer"
                book.add(self._path(field), tensor, kind, is_destination=is_destination)

    def _path(self, field: Field) -> str:
        if field.key == AVERAGE:
            return f"{_EMA}/{field.name}"
        return f"{_key(self._owners[field.name])}/{field.name}/{field.key}"

    def _tree(self, updater: Updater, book: Book) -> dict[str, Any]:
        """As an optimizer that is saved alone has it (checkpoint/optimizers.py)."""
        groups = [
            {
                **trees.encode(settings, book.store, f"{_key(updater)}/group-{place}"),
                "parameters": own,
            }
            for place, (own, settings) in enumerate(updater.groups())
        ]
        state: dict[str, dict[str, Any]] = {}
        tensors: dict[str, list[str]] = {}
        for name in updater.names:
            if not self._version.has_begun(name):
                continue
            tensors[name] = []
            for field, tensor in self._version.fields_of(name):
                if field.key in (VALUE, AVERAGE):
                    continue
                if field.kind == "tensor":
                    tensors[name].append(field.key)
                else:
                    value = trees.encode(read_field(field, tensor), book.store)
                    state.setdefault(name, {})[field.key] = value
        return {"groups": groups, "state": state, "tensors": tensors}

    # --- in -----------------------------------------------------------------------------------

    def prepare(self, book: Book, opened: Opened, tree: Any) -> None:
        """Refuse what training cannot go on from; then the version's own memory is filled."""
        if tree is None:
            raise MismatchError(
                f"{opened.path} was not saved by a trainer",
                fix="load it with ar.checkpoint.Checkpointer, or resume from another one",
            )
        self._check(opened, tree)
        version, self._loaded, self._trees = self._version, tree, opened.trees()
        begun = set(tree["begun"])
        self._add_tensors(book, begun.__contains__, is_destination=True)
        size = tree["ledger"].get(IMAGE, 0)
        if size:
            room = version.room_for_image(size)
            book.add(f"{KEY}/{IMAGE}", room, "optimizer", is_destination=True)

    def finish(self) -> Mapping[str, Any]:
        """The ledger, the numbers that optimizers keep, and which states have begun."""
        begun = set(self._loaded["begun"])
        for name in self._version.plan.names:
            self._version.set_begun(name, name in begun)
        for field, tensor in zip(self._version.plan.fields, self._version.tensors, strict=True):
            if field.kind != "tensor" and field.name in begun:
                state = self._trees[_key(self._owners[field.name])]["state"]
                write_field(
                    field,
                    tensor,
                    trees.decode(state[field.name][field.key], _no_tensor),
                    field.name,
                )
        self._version.ledger = trees.decode(self._loaded["ledger"], _no_tensor)
        return self._loaded

    def _check_data(self, opened: Opened, tree: Mapping[str, Any]) -> None:
        """Batches must be those that it was trained with."""
        # Of a checkpoint that says no more than that they are others both values are not known.
        changed = find_differences(tree.get("feed", {}), self._facts["feed"])
        if changed:
            shown = changed[:_MOST_SHOWN]
            more = f", and {len(changed) - len(shown)} more" if len(changed) > len(shown) else ""
            what = ", ".join(f"{each.name} = {each.before} (now {each.after})" for each in shown)
            wanted = ", ".join(f"{each.name} = {each.before}" for each in shown)
            raise MismatchError(
                f"{opened.path} was trained with {what}{more}",
                fix=f"resume with {wanted}{more}, or start a new run",
            )
        if tree["data"] != self._facts["data"]:
            raise MismatchError(
                f"{opened.path} was trained on other data, another batch size, other lanes or another seed",
                fix="resume with the same data and seed, or start a new run",
            )

    def _check(self, opened: Opened, tree: Mapping[str, Any]) -> None:
        if tree["plan"] != self._version.plan.digest:
            what = misfits.describe(self._outline_of(opened), self._outline())
            raise MismatchError(
                f"{opened.path} was saved by another model or optimizer"
                + (f": it was trained with {what}" if what else ""),
                fix="resume with the model and optimizer it was made with, or start a new run",
            )
        self._check_data(opened, tree)
        changed = fingerprint.differences(tree["fingerprint"], self._facts["fingerprint"])
        if changed and not self._allow_drift:
            raise MismatchError(
                f"{opened.path} was saved under another numerics fingerprint: {'; '.join(changed)}",
                fix="resume where it was saved, or give --allow-drift: bits will differ",
            )

    def _outline(self) -> Outline:
        """What this trainer's state consists of."""
        tensors = self._model.state_dict(keep_vars=True)
        model = {
            name: _form(self._trained(name, value))
            for name, value in tensors.items()
            if isinstance(value, torch.Tensor)
        }
        kept: dict[str, set[str]] = {name: set() for name in self._version.plan.names}
        for field in self._version.plan.fields:
            kept[field.name].add(field.key)
        return Outline(
            model=model,
            optimizers={
                updater.name: {
                    name: frozenset(kept[name] - {VALUE, AVERAGE}) for name in updater.names
                }
                for updater in self._updaters
            },
            has_averages=any(AVERAGE in keys for keys in kept.values()),
        )

    def _outline_of(self, opened: Opened) -> Outline:
        """What a trainer's checkpoint consists of."""
        model, has_averages = {}, False
        for name in opened.names():
            record = opened.record(name)
            is_average = name.startswith(f"{_EMA}/")
            has_averages = has_averages or is_average
            if record.kind in ("model", "frozen") and not is_average:
                # Elements of two halves are saved with a dim more.
                shape = record.shape[:-1] if record.meaning else record.shape
                model[name] = Form(record.meaning or FROM_FILE[record.dtype], tuple(shape))
        return Outline(
            model=model,
            optimizers={
                key.removeprefix(_OPTIMIZER).removeprefix("."): _kept(tree)
                for key, tree in opened.trees().items()
                if key.partition(".")[0] == _OPTIMIZER
            },
            has_averages=has_averages,
        )


def _kept(tree: Mapping[str, Any]) -> dict[str, frozenset[str] | None]:
    """Parameters of a saved optimizer, with what it keeps for each; None for one that it has not begun with."""
    tensors, numbers = tree["tensors"], tree["state"]
    return {
        name: frozenset((*tensors[name], *numbers.get(name, ()))) if name in tensors else None
        for group in tree["groups"]
        for name in group["parameters"]
    }


def _form(tensor: torch.Tensor) -> Form:
    return Form(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _key(updater: Updater) -> str:
    return f"{_OPTIMIZER}.{updater.name}" if updater.name else _OPTIMIZER


def _no_tensor(word: str, name: str) -> Any:
    raise MismatchError(f"the ledger names the tensor {name!r}", fix="use another checkpoint")
