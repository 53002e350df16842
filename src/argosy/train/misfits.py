"""In what a saved state and the trainer that is to go on with it differ, in words for whoever resumes.

Both are described alike by storedstate.py: tensors, what optimizers keep, averages. The first difference is told, from the model outwards. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Form(NamedTuple):
    """What a tensor is."""

    dtype: str
    shape: tuple[int, ...]


class Outline(NamedTuple):
    """What a state consists of."""

    model: Mapping[str, Form]
    """Tensors of the module, by their names in it."""
    optimizers: Mapping[str, Mapping[str, frozenset[str] | None]]
    """By the optimizer's name: its parameters, each with what is kept for it, if that is known. Empty: user code makes the updates."""
    has_averages: bool


def describe(before: Outline, now: Outline) -> str:
    """What it was trained with and what there is now; an empty text when there is no difference that could be named."""
    tellers = (
        _differ_in_layout,
        _differ_in_tensors,
        _differ_in_optimizers,
        _differ_in_averages,
        _differ_in_dtypes,
    )
    return next(filter(None, (tell(before, now) for tell in tellers)), "")


def _differ_in_layout(before: Outline, now: Outline) -> str:
    words = [f'layout="{"shared" if each.optimizers else "replicated"}"' for each in (before, now)]
    return "" if words[0] == words[1] else f"{words[0]} (now {words[1]})"


def _differ_in_tensors(before: Outline, now: Outline) -> str:
    old, new = ({name: form.shape for name, form in each.model.items()} for each in (before, now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not names:
        return ""
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r} {_shape(old.get(names[0]))} (now {_shape(new.get(names[0]))}){more}"


def _differ_in_optimizers(before: Outline, now: Outline) -> str:
    if set(before.optimizers) != set(now.optimizers):
        return f"{_call(before.optimizers)} (now {_call(now.optimizers)})"
    for optimizer, old in before.optimizers.items():
        new = now.optimizers[optimizer]
        whose = f" of optimizer {optimizer!r}" if optimizer else ""
        for name in {**old, **new}:
            if (name in old) != (name in new):
                words = ("trained", "not") if name in old else ("not trained", "trained")
                return f"{name!r} {words[0]} (now {words[1]}){whose}"
            kept, keeps = old[name], new[name]
            if kept is not None and keeps is not None and kept != keeps:
                return (
                    f"an optimizer that keeps {_list(kept)} of {name!r} (now {_list(keeps)}){whose}"
                )
    return ""


def _differ_in_averages(before: Outline, now: Outline) -> str:
    if before.has_averages == now.has_averages:
        return ""
    return "averages, ema= (now without)" if before.has_averages else "no averages (now with ema=)"


def _differ_in_dtypes(before: Outline, now: Outline) -> str:
    for name, form in before.model.items():
        if name in now.model and form.dtype != now.model[name].dtype:
            return f"{name!r} in {form.dtype} (now {now.model[name].dtype})"
    return ""


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {shape}"


def _call(optimizers: Mapping[str, object]) -> str:
    names = [repr(name) for name in sorted(optimizers) if name]
    return f"optimizers {', '.join(names)}" if names else "one optimizer"


def _list(names: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
