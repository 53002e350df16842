"""Puts a trainer's parts together: what is trained, the plan of the state, the layout of the exchange, the first version.

Called once per process by trainer.py, also by replacements, which find everything there. Every rank must come to the same plan and the same initial bits: both are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from argosy.errors import ConfigError, MismatchError
from argosy.move.layout import Layout, Parameter
from argosy.train import digests, stillness
from argosy.train.lanes import BUFFER, WHOLE
from argosy.train.memories import Memories, Version, Weights
from argosy.train.replicas import PrivateWeights
from argosy.train.roster import Roster
from argosy.train.settings import Settings
from argosy.train.stateplan import AVERAGE, MOST_PARTS, VALUE, Field, StatePlan
from argosy.train.updates import Factory, Updater, check_disjoint, field_of

_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


def prepare_numerics(settings: Settings) -> None:
    """Make operations of this process deterministic, where the mode asks for it."""
    if settings.mode == "exact":
        torch.use_deterministic_algorithms(True)
        # What is never read need not be filled: it costs 16 ms per ten million elements.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def prepare_compiler(settings: Settings) -> None:
    """Let every shape be compiled for itself: else which kernels a rank has would depend on the shapes it has met, and in which order."""
    compiler = sys.modules.get("torch._dynamo")
    if settings.mode == "exact" and compiler is not None:
        config = compiler.config
        config.automatic_dynamic_shapes = False
        # Beyond this many shapes it would not compile any more.
        config.recompile_limit = max(config.recompile_limit, config.accumulated_recompile_limit)


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the module or a part of it is, by `torch.compile(module)` or `module.compile()`."""
    return any(
        plain(part) is not part or part._compiled_call_impl is not None for part in model.modules()
    )


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself, when it was given compiled."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else model


def trained_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that get gradients."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}
    if not found:
        raise ConfigError("the model has no parameter to train", fix="set requires_grad on some")
    for name, parameter in found.items():
        if parameter.is_complex() or not parameter.is_floating_point():
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype}",
                fix="train floating-point parameters; keep complex ones as two real ones",
            )
        if parameter.device.type == "meta":
            raise ConfigError(
                f"parameter {name!r} is on the meta device", fix="give a model that is materialised"
            )
    return found


def changing_buffers(model: torch.nn.Module, forward: Any) -> dict[str, torch.Tensor]:
    """Persistent buffers that one forward pass changes, such as batch statistics; the pass leaves no trace.

    Without a `forward` all that could travel with gradients: it is not known then.
    """
    buffers = stillness.saved_buffers(model)
    if forward is None:
        return {name: buffer for name, buffer in buffers.items() if _can_travel(buffer)}
    if not buffers:
        return buffers
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    forward()  # with gradients: a loss may ask for some itself
    with torch.no_grad():
        changed = {
            name: buffer for name, buffer in buffers.items() if not _equal(buffer, before[name])
        }
        for name, buffer in buffers.items():
            buffer.copy_(before[name])
    return changed


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a parameter is updated in: float32, or float64 if it is that itself."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_updaters(
    optimizer: Factory | Mapping[str, Factory] | None, trained: Mapping[str, torch.nn.Parameter]
) -> list[Updater]:
    """The optimizers, in the order given."""
    # .data: with counters of changes of their own, so that an update does not look like a change of the weights.
    masters = {
        name: torch.nn.Parameter(p.data.to(master_dtype(p.dtype))) for name, p in trained.items()
    }
    factories = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
    if not 1 <= len(factories) <= MOST_PARTS:
        raise ConfigError(
            f"{len(factories)} optimizers",
            fix=f"give 1 to {MOST_PARTS}: one optimizer may have many groups of parameters",
        )
    updaters = [Updater(name, factory, masters) for name, factory in factories.items()]
    check_disjoint(updaters, trained)
    return updaters


def make_plan(
    trained: Mapping[str, torch.nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
    updaters: list[Updater],
    settings: Settings,
) -> StatePlan:
    """What a version of the state consists of."""
    kept: dict[str, list[Field]] = {name: [] for name in trained}
    for updater in updaters:
        for field in updater.probe():
            kept[field.name].append(field)
    fields: list[Field] = []
    for name, parameter in trained.items():
        kind = master_dtype(parameter.dtype)
        fields.append(field_of(name, VALUE, parameter, kind))
        fields += kept[name]
        if settings.ema is not None:
            fields.append(field_of(name, AVERAGE, parameter, kind))
    for name, buffer in buffers.items():
        fields.append(field_of(BUFFER + name, VALUE, buffer))
    names = (*trained, *(BUFFER + name for name in buffers))
    return StatePlan(names=names, fields=tuple(fields))


def make_layout(plan: StatePlan, updaters: list[Updater], lanes: int, settings: Settings) -> Layout:
    """The gradient space: parameters, then buffers, which travel with the first part."""
    parameters = tuple(
        Parameter(name=field.name, numel=field.numel, is_double=field.dtype == "float64")
        for field in plan.fields
        if field.key == VALUE
    )
    buffers = tuple(name for name in plan.names if name.startswith(BUFFER))
    parts: tuple[tuple[str, ...], ...] = ()
    if len(updaters) > 1:
        parts = tuple(
            (*updater.names, *(buffers if place == 0 else ()))
            for place, updater in enumerate(updaters)
        )
    return Layout(
        num_lanes=lanes,
        most_ranks=settings.most_ranks,
        parameters=parameters,
        terms=(WHOLE, *settings.terms),
        parts=parts,
        # They stand for the run itself, which pins what is saved and what may be gone back to.
        num_observers=2,
        num_versions=4,
        # One more than pairs of lanes would do: a rank that finds none free waits for a sibling to be added.
        num_slots=min(lanes, (lanes + 1) // 2 + 2),
    )


def make_memories(
    prefix: str, model: torch.nn.Module, plan: StatePlan, settings: Settings, num_parts: int
) -> Memories:
    """The state, and the weights: one shared copy in the compute dtype, or the module's own."""
    only = None if settings.recovery else Version(f"{prefix}.state.0", plan)
    name = f"{prefix}.weights"
    if settings.layout == "replicated":
        return Memories(prefix, PrivateWeights(name, model), plan, only)
    # Of several updates each begins with the weights of the step's beginning: those cannot be what the first one changes.
    lender = only if num_parts == 1 else None
    weights = Weights(name, model, _DTYPES[settings.precision], lender)
    return Memories(prefix, weights, plan, only)


def begin(
    memories: Memories,
    roster: Roster,
    buffers: Mapping[str, torch.Tensor],
    restore: Callable[[Version], bool],
) -> None:
    """Make the first version, from this process's initial values or from a checkpoint; or check that the run began with the same values."""
    parameters = memories.weights.parameters
    values = {**parameters, **{BUFFER + name: buffer for name, buffer in buffers.items()}}
    own = [digests.of_tensor(value) for value in values.values()]
    # Alone: one that was late in here would write over what the others, who do not wait for a newcomer, have trained by then.
    with memories.weights.alone():
        if roster.initial() is None:
            first = memories.version(0)
            if not restore(first):
                _fill(first, values)
            memories.weights.fill()
            memories.refresh(0, list(memories.plan.names))
            roster.begin(own)
    known = roster.initial()
    assert known is not None
    different = [name for name, a, b in zip(values, own, known, strict=True) if a != b]
    if different:
        raise MismatchError(
            f"{different[0]!r} began with other values here than on another rank "
            f"({len(different)} of {len(own)} tensors differ)",
            fix="build the model from torch's default generators alone, which are seeded alike on every rank",
        )


def _fill(version: Version, values: Mapping[str, torch.Tensor]) -> None:
    for name in version.plan.names:
        for field, tensor in version.fields_of(name):
            if field.key in (VALUE, AVERAGE):
                tensor.copy_(values[name].detach())


def _can_travel(buffer: torch.Tensor) -> bool:
    """A mask of infinities would look like a step that is not finite, and a whole number may be too large for a slot."""
    if buffer.is_floating_point():
        return bool(buffer.isfinite().all())
    return not buffer.is_complex() and bool((buffer.double().abs() <= 1 << 24).all())


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
