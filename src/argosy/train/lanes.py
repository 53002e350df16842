"""One block of lanes: seeds, rounding mode, batch, forward, backward into a slot of the exchange.

A lane's gradient depends on the weights, the step and the lane alone: default generators are seeded, denormals are treated alike, and buffers that forward changes begin with their committed values.
`p.grad` is a view into the slot while a lane runs backward, so that sibling lanes accumulate in place; what autograd puts elsewhere is brought back. Two lanes in one slot must come to the bits of two slots
added: a parameter that gets its gradient in several pieces is therefore added up apart. Knows nothing of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from argosy.errors import ConfigError
from argosy.move.gathered import Claim, values_of
from argosy.move.layout import Layout
from argosy.train.integrity import Places
from argosy.train.modes import Modes
from argosy.train.seeds import seed_all
from argosy.train.stillness import Stillness

Loss = Callable[[torch.nn.Module, Any], Any]
Terms = dict[str, tuple[float, float]]
_DTYPES = {False: torch.float32, True: torch.float64}
BUFFER = "buffer:"
WHOLE = "(whole)"
"""The term that backward began from: with its count as the denominator, or 0 where terms were divided before."""


class Lanes:
    """Computes blocks of lanes on this rank's model."""

    def __init__(
        self,
        model: torch.nn.Module,
        trained: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        *,
        seed: int,
        is_exact: bool,
    ) -> None:
        plain = getattr(model, "_orig_mod", model)  # of a compiled one
        self._model = model
        self._modes = Modes(model)
        self._layout = layout
        self._seed = seed
        self._is_exact = is_exact
        self._trained = dict(trained)
        kinds = {each.name: _DTYPES[each.is_double] for each in layout.parameters}
        self._direct = {n: p for n, p in trained.items() if p.dtype == kinds[n]}
        self._indirect = {n: p for n, p in trained.items() if p.dtype != kinds[n]}
        self._views: dict[int, list[torch.Tensor]] = {}
        self._buffers = {
            name: buffer
            for name, buffer in plain.named_buffers()
            if BUFFER + name in layout.indices
        }
        self._still = Stillness(plain, set(self._buffers))
        self._places = Places(plain, trained)
        self._apart: set[str] = set()
        """Parameters whose gradient comes in several pieces: (a + b) + c is not a + (b + c)."""
        self.lane = -1
        """The lane that is being computed, for reports."""
        if plain is model:
            for parameter in trained.values():
                _coalesce(parameter)
        # Slots have elements in the order of masters, whatever order the module keeps its own in: one pass of a strided add.
        warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout")

    @property
    def has_buffers(self) -> bool:
        """Whether forward changes any."""
        return bool(self._buffers)

    def compute(
        self,
        claim: Claim,
        step: int,
        loss: Loss,
        batch_of: Callable[[int], Any],
        committed: Callable[[str], torch.Tensor],
    ) -> tuple[frozenset[str], Terms]:
        """Fill a slot with the gradient of its lanes; the parameters touched, and the totals of the loss terms."""
        while True:
            found = self._fill(claim, step, loss, batch_of, committed)
            if found is not None:
                return found

    def _fill(
        self,
        claim: Claim,
        step: int,
        loss: Loss,
        batch_of: Callable[[int], Any],
        committed: Callable[[str], torch.Tensor],
    ) -> tuple[frozenset[str], Terms] | None:
        """None: a gradient that came in pieces has spoilt the slot; it is known now."""
        claim.zero()
        views = self._views_of(claim)
        counters = [view._version for view in views]
        seen = list(counters)
        touched: set[str] = set()
        terms: Terms = {}
        self._places.check()
        self._modes.resume()
        self._still.note()
        for lane in range(claim.node.first, claim.node.stop):
            self.lane = lane
            is_first = lane == claim.node.first
            # Before the seeds: user code that makes a batch draws from the same generators.
            batch = batch_of(lane)
            self._prepare(step, lane, committed)
            total, found = self._evaluate(loss, batch)
            # Only now: whatever user code does with gradients while it computes a loss leaves no trace.
            for (name, parameter), view in zip(self._direct.items(), views, strict=True):
                parameter.grad = None if name in self._apart and not is_first else view
            for parameter in self._indirect.values():
                parameter.grad = None
            if total is not None:
                torch.autograd.backward(total)
            if not self._collect(views, seen, is_first):
                return None
            self._take_buffers(claim, lane)
            for name, (part, count) in found.items():
                before = terms.get(name)
                value = (_number(part), float(count))
                terms[name] = value if before is None else _plus(before, value)
            touched |= self._take_indirect(claim)
        self._still.check(step)
        for name, view, counter in zip(self._direct, views, counters, strict=True):
            if view._version != counter:
                touched.add(name)
        touched.update(BUFFER + name for name in self._buffers)
        return frozenset(touched), terms

    def _prepare(self, step: int, lane: int, committed: Callable[[str], torch.Tensor]) -> None:
        if self._is_exact:
            torch.set_flush_denormal(False)
        seed_all(self._seed, step, lane)
        for name, buffer in self._buffers.items():
            buffer.copy_(committed(BUFFER + name))

    def _evaluate(
        self, loss: Loss, batch: Any
    ) -> tuple[torch.Tensor | None, dict[str, tuple[Any, float]]]:
        """What backward begins from (None: from nothing, this lane counts nothing), and the terms."""
        given = loss(self._model, batch)
        if isinstance(given, Mapping):
            total, found = self._weigh(given, getattr(batch, "totals", None))
        else:
            total, count = _checked(given, "loss")
            name = self._layout.terms[1]  # of one term alone the name is the trainer's
            found = {WHOLE: (total, count), name: (total, count)}
        return (total if total.requires_grad else None), found

    def _weigh(
        self, given: Mapping[str, Any], totals: Mapping[str, float] | None
    ) -> tuple[torch.Tensor, dict[str, tuple[Any, float]]]:
        """Named terms: each divided by its own total over all lanes, then weighted."""
        found: dict[str, tuple[Any, float]] = {}
        whole: Any = 0.0
        for name, value in given.items():
            if name not in self._layout.terms[1:]:
                raise ConfigError(
                    f"the loss returned a term {name!r}",
                    fix=f"name it: run.trainer(terms=({', '.join(map(repr, given))},))",
                )
            is_weighed = isinstance(value, tuple | list) and len(value) == 3
            weight = float(value[2]) if is_weighed else 1.0
            part, count = _checked(value[:2] if is_weighed else value, name)
            found[name] = (part, count)
            if len(given) == 1:
                return weight * part, {**found, WHOLE: (weight * part, count)}
            if not totals or name not in totals:
                raise ConfigError(
                    f"term {name!r} has no total: several terms may have different denominators",
                    fix="run.trainer(counts=lambda batch: {name: count}) gives them before backward",
                )
            whole = whole + part * (weight / totals[name])
        whole = torch.as_tensor(whole)  # of no terms at all
        return whole, {**found, WHOLE: (whole, 0.0)}

    def _collect(self, views: list[torch.Tensor], seen: list[int], is_first: bool) -> bool:
        """Bring back what autograd has put elsewhere; `seen` counts the changes of each view. False: the slot is spoilt."""
        is_spoilt = False
        for place, (name, parameter) in enumerate(self._direct.items()):
            view = views[place]
            gradient, parameter.grad = parameter.grad, None
            if gradient is view:
                if view._version > seen[place] + 1 and self._is_exact:
                    self._apart.add(name)
                    is_spoilt |= not is_first
            elif gradient is not None:
                with torch.no_grad():
                    # Apart it is this lane's alone; otherwise autograd has added it to what was there, out of place.
                    is_apart = name in self._apart and not is_first
                    view.add_(gradient) if is_apart else view.copy_(gradient)
            seen[place] = view._version
        return not is_spoilt

    def _take_buffers(self, claim: Claim, lane: int) -> None:
        for name, buffer in self._buffers.items():
            place = claim.gradient(BUFFER + name).view(buffer.shape)
            if buffer.is_floating_point():
                place.add_(buffer)
            elif lane == 0:
                place.copy_(buffer)
                if not torch.equal(place.to(buffer.dtype), buffer):
                    raise ConfigError(
                        f"buffer {name!r} changes in forward and has whole numbers beyond 2**24",
                        fix="keep large counts as run.state, or as two smaller buffers",
                    )

    def _take_indirect(self, claim: Claim) -> set[str]:
        """Gradients in another dtype than the slot's are added lane by lane."""
        touched = set()
        for name, parameter in self._indirect.items():
            if parameter.grad is not None:
                claim.gradient(name).view(parameter.shape).add_(parameter.grad)
                parameter.grad = None
                touched.add(name)
        return touched

    def _views_of(self, claim: Claim) -> list[torch.Tensor]:
        flat = claim.flat
        slot = getattr(claim, "slot", None)  # an audit's memory has none, and is not kept
        found = None if slot is None else self._views.get(slot)
        if found is None:
            # .data: a counter of changes for each, by which a parameter without a gradient is told from one with zeros.
            found = [
                values_of(flat, self._layout, name).view(parameter.shape).data
                for name, parameter in self._direct.items()
            ]
            if slot is not None:
                self._views[slot] = found
        return found


def _coalesce(parameter: torch.nn.Parameter) -> None:
    """Rows of a sparse gradient that come more than once are added up before they reach the slot; looked for until there is a dense one."""

    def look(gradient: torch.Tensor) -> torch.Tensor | None:
        if gradient.is_sparse:
            return gradient.coalesce()
        handle.remove()
        return None

    handle = parameter.register_hook(look)  # type: ignore[no-untyped-call]


def _checked(value: Any, name: str) -> tuple[torch.Tensor, float]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(
            f"the loss returned {type(value).__name__} for {name!r}, not (sum, count)",
            fix="return the sum over the lane and what it counts: loss_sum, labels.numel()",
        )
    total, count = value
    if isinstance(count, torch.Tensor):
        count = count.item()
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        raise ConfigError(
            f"the sum of {name!r} is {type(total).__name__}, not a tensor with one element",
            fix='use reduction="sum"',
        )
    if not isinstance(count, int | float) or not math.isfinite(count) or count < 0:
        raise ConfigError(
            f"the count of {name!r} is {count!r}", fix="return a number, not negative"
        )
    # A lane in which there is nothing to learn from may say so with a plain zero.
    if not total.requires_grad and (count or total.item()):
        raise ConfigError(
            f"the sum of {name!r} does not depend on any parameter",
            fix="return it without .detach() or .item()",
        )
    return total, float(count)


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _plus(left: tuple[float, float], right: tuple[float, float]) -> tuple[float, float]:
    return left[0] + right[0], left[1] + right[1]
