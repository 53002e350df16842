"""What user code holds in its loop: a step, which is a transaction, and the result it comes to.

`step()` is `update` and `commit`; several losses make several updates and one commit. Nothing of a step is visible before its commit. Made by trainer.py; the work itself is in transaction.py.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any, Protocol

from argosy.errors import ConfigError

if TYPE_CHECKING:
    from argosy.train.feeding import Produce
    from argosy.train.lanes import Loss


class Maker(Protocol):
    """Who makes steps: the trainer."""

    @property
    def num_parts(self) -> int:
        """Updates in a step."""

    def part_of(self, optimizer: str | None, made: int) -> int:
        """The number of an optimizer's part."""

    def compute(self, step: Step, part: int, loss: Loss | None) -> None:
        """Make one update."""

    def gradients(self, step: Step, loss: Loss | None) -> Gradients:
        """Give each parameter its gradient."""

    def finish(self, step: Step, seconds: float) -> Result:
        """Commit."""

    def agree(self, number: int, value: Any) -> Any:
        """The value of whoever comes first."""

    def feed(self, step: Step, produce: Produce, *, record: bool) -> None:
        """Take lanes' batches from user code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a committed step came to; the same on every rank but for the seconds."""

    step: int
    loss: float
    gradient_norm: float
    terms: dict[str, float]
    """Mean of each term of the loss."""
    tokens: float
    """What the loss counted."""
    seconds: float
    is_skipped: bool = False
    """Whether the guard has left it out: the state is the one before, or an older one."""
    is_rewound: bool = False
    """Whether it went back to a snapshot: the next step is an earlier one."""
    parts: tuple[dict[str, Any], ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.seconds if self.seconds > 0 else math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
    """What a call of `step.gradients` came to; the same on every rank."""

    loss: float
    gradient_norm: float
    """Before it was clipped."""
    terms: dict[str, float]
    """Mean of each term of the loss."""
    tokens: float
    """What the loss counted."""
    is_skipped: bool = False
    """Whether the guard has left it out: no parameter has a gradient."""


def gradients_of(outcome: dict[str, Any]) -> Gradients:
    """What user code is told of an outcome."""
    found = result_of(0, [outcome], 0.0)
    return Gradients(
        loss=found.loss,
        gradient_norm=found.gradient_norm,
        terms=found.terms,
        tokens=found.tokens,
        is_skipped=found.is_skipped,
    )


def result_of(step: int, parts: list[dict[str, Any]], seconds: float) -> Result:
    """The result of a step from what its parts left in the committed version."""
    terms = {
        name: total / (count or 1.0)
        for part in parts
        for name, (total, count) in part["terms"].items()
    }
    return Result(
        step=step,
        loss=sum(part["loss"] for part in parts),
        gradient_norm=parts[0]["norm"],
        terms=terms,
        tokens=max(count for _, count in parts[0]["terms"].values()),
        seconds=seconds,
        is_skipped=any(part["verdict"] != "go" for part in parts),
        is_rewound=any(part["verdict"] == "rewind" for part in parts),
        parts=tuple(parts),
    )


class Step:
    """One optimizer update of the whole run."""

    def __init__(self, trainer: Maker, index: int) -> None:
        self._trainer = trainer
        self._started = time.monotonic()
        self._updated: list[int] = []
        self._agreements = 0
        self.num_edits = 0
        """Edits made before the update."""
        self.index = index
        self.result: Result | None = None
        """Set by the commit."""

    @property
    def is_open(self) -> bool:
        """Whether nothing of it is computed yet."""
        return not self._updated and self.result is None

    def __call__(self) -> Result:
        """Compute, update, commit."""
        self.update()
        return self.commit()

    def update(self, loss: Loss | None = None, optimizer: str | None = None) -> None:
        """Compute the gradient of a loss on all lanes and update the parameters of one optimizer."""
        part = self._trainer.part_of(optimizer, len(self._updated))
        if self.result is not None or part in self._updated:
            raise ConfigError(
                f"step {self.index} has this update already", fix="make one update per optimizer"
            )
        self._trainer.compute(self, part, loss)
        self._updated.append(part)

    def gradients(self, loss: Loss | None = None) -> Gradients:
        """With `layout="replicated"`: give each parameter as `p.grad` the gradient of a loss on all lanes, at the weights of this moment.

        Then update the parameters and commit. May be called again in a step, after the weights have changed.
        """
        if self.result is not None:
            raise ConfigError(f"step {self.index} is committed already", fix="take the next step")
        found = self._trainer.gradients(self, loss)
        self._updated = [0]
        return found

    def commit(self) -> Result:
        """Make the step's new version the committed one."""
        if self.result is not None:
            raise ConfigError(f"step {self.index} is committed already", fix="take the next step")
        missing = self._trainer.num_parts - len(self._updated)
        if missing:
            raise ConfigError(
                f"step {self.index} has {missing} updates to make before its commit",
                fix='call step.update(loss, optimizer=…) for each optimizer; with layout="replicated" step.gradients()',
            )
        self.result = self._trainer.finish(self, time.monotonic() - self._started)
        return self.result

    def feed(self, produce: Produce, *, record: bool = False) -> None:
        """Let user code make this step's batches: `produce(lane)` returns named tensors, and is called by one rank for each lane.

        They are kept until the commit, so that a lane is always computed from the same bytes; `record=True` keeps them in the run's directory `fed`.
        """
        if not self.is_open:
            raise ConfigError(
                f"step {self.index} is under way already", fix="call step.feed() before the update"
            )
        self._trainer.feed(self, produce, record=record)

    def agree(self, value: Any) -> Any:
        """The value of whichever rank came first; for decisions from a clock, a file or anything else that ranks may see differently."""
        self._agreements += 1
        return self._trainer.agree(self._agreements - 1, value)
