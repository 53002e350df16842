"""How a trainer behaves besides model, data, loss and optimizer: one frozen object, checked when it is made.

Given to `run.trainer(settings=…)`, or field by field as keyword arguments. Read by the parts of the trainer; never changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from argosy.config.nearest import did_you_mean
from argosy.errors import ConfigError
from argosy.train.checkpoints import Checkpoints
from argosy.train.guards import Guard

Mode = Literal["exact", "fast"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything but the batch size has a default."""

    batch_size: int = 0
    """Rows of the global batch."""
    lanes: int = 8
    """Slices of the global batch, fixed for the life of a run: the unit of arithmetic, and the most ranks."""
    clip: float | None = None
    """Largest norm of the gradient of each update."""
    schedule: Callable[[int], float] | None = None
    """Factor of the learning rates by step."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights that the model computes with; masters stay float32. float64 parameters have float64 masters, gradients and sums."""
    mode: Mode = "exact"
    layout: Literal["shared", "replicated"] = "shared"
    ema: float | None = None
    """Decay of the average of the parameters; None: none is kept."""
    guard: Guard = dataclasses.field(default_factory=Guard)
    counts: Callable[[Any], Mapping[str, float]] | None = None
    """Denominators of named loss terms, for a batch, before backward."""
    terms: tuple[str, ...] = ("loss",)
    """Names of the loss terms, when the loss returns several."""
    prefetch: int = 2
    """Steps whose batches are made ahead; 0: none."""
    recovery: bool = True
    """Whether steps outlive the death of a rank. False: state is updated in place, nobody watches for hangs, and a rank that ends ends the run."""
    checkpoints: Checkpoints | None = dataclasses.field(default_factory=Checkpoints)
    """When to save beside training; None: only on a stop and at the end."""
    audit: bool = True
    """Compute one block of the first step twice, on two ranks, and compare bits; exact mode only."""
    save_at_end: bool = True
    """Save what was trained when the program ends, if there is something new; a stop saves always."""
    allow_drift: bool = False
    """Resume although the numerics fingerprint is another one."""
    hang_seconds: float = 1.0
    """A member that does nothing for so long beyond three median steps is taken for hung."""
    first_hang_seconds: float = 300.0
    """The same while no step is done yet: compilation, warm-up; and how much longer than the others a process may take before it begins to train."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def most_ranks(self) -> int:
        """A rank without a lane would have nothing to do."""
        return self.lanes


def resolve(settings: Settings | None, given: Mapping[str, Any]) -> Settings:
    """Settings with the keyword arguments applied."""
    known = {field.name for field in dataclasses.fields(Settings)}
    for name in given:
        if name not in known:
            raise ConfigError(
                f"run.trainer() has no argument {name!r}", fix=did_you_mean(name, known)
            )
    return dataclasses.replace(settings, **given) if settings else Settings(**given)


def _check(settings: Settings) -> None:
    _check_choice("precision", settings.precision, ("float32", "bfloat16"))
    _check_choice("mode", settings.mode, ("exact", "fast"))
    _check_choice("layout", settings.layout, ("shared", "replicated"))
    _check_kinds(settings)
    if settings.clip is not None and not settings.clip > 0:
        raise ConfigError(f"clip = {settings.clip}", fix="give a positive norm, or None")
    if settings.ema is not None and not 0 < settings.ema < 1:
        raise ConfigError(f"ema = {settings.ema}", fix="give a decay between 0 and 1, or None")
    _check_replicated(settings)
    if settings.guard.policy == "rewind" and not settings.recovery:
        raise ConfigError(
            "guard policy rewind with recovery=False: no version is kept to go back to",
            fix='use policy="skip" or "stop", or leave recovery on',
        )
    _check_whole("batch_size", settings.batch_size)
    _check_whole("lanes", settings.lanes)
    _check_whole("prefetch", settings.prefetch)
    if settings.batch_size < 1 or settings.lanes < 1:
        raise ConfigError(
            f"batch_size = {settings.batch_size}, lanes = {settings.lanes}",
            fix="run.trainer(batch_size=32, lanes=8), for example",
        )
    if settings.prefetch < 0:
        raise ConfigError(f"prefetch = {settings.prefetch}", fix="give 0 or more")
    if settings.hang_seconds <= 0 or settings.first_hang_seconds <= 0:
        raise ConfigError("hang_seconds is not positive", fix="give seconds")


def _check_kinds(settings: Settings) -> None:
    """What would only be noticed in the middle of a step."""
    kinds = {
        "schedule": (
            settings.schedule is None or callable(settings.schedule),
            "give a function of the step: schedule=ar.schedules.cosine(1000, warmup=100)",
        ),
        "counts": (
            settings.counts is None or callable(settings.counts),
            "give a function of a batch: counts=lambda batch: {name: count}",
        ),
        "guard": (isinstance(settings.guard, Guard), 'guard=ar.Guard(policy="rewind")'),
        "checkpoints": (
            settings.checkpoints is None or isinstance(settings.checkpoints, Checkpoints),
            "checkpoints=ar.Checkpoints(every=500)",
        ),
        "terms": (
            type(settings.terms) in (tuple, list) and bool(settings.terms),
            'give names: terms=("loss", "auxiliary")',
        ),
    }
    for name, (is_right, fix) in kinds.items():
        if not is_right:
            raise ConfigError(f"{name} = {getattr(settings, name)!r}", fix=fix)


def _check_replicated(settings: Settings) -> None:
    """There user code updates the module's own parameters: what the trainer's update would do is its to do."""
    if settings.layout != "replicated":
        return
    refused = {
        "precision": (settings.precision != "float32", "give a model in the dtype you want"),
        "ema": (settings.ema is not None, "keep an average in the model, as buffers"),
        "schedule": (
            settings.schedule is not None,
            'set group["lr"] of trainer.optimizer from step.index in the loop',
        ),
        "guard": (settings.guard.policy == "rewind", 'use policy="skip" or "stop"'),
    }
    for name, (is_given, fix) in refused.items():
        if is_given:
            value = getattr(settings, name)
            raise ConfigError(f'{name} = {value!r} with layout="replicated"', fix=fix)


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} = {value!r} is not a whole number", fix=f"example: {name}=8")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} = {value!r}", fix=did_you_mean(str(value), choices))
