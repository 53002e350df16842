"""What a trainer offers beside its steps: evaluations, edits, other weights, batches made by user code; and how every call into the step's machinery begins and ends.

The trainer's loop is built on this. A call enters the run when it is the first one; one that finds the run stopping saves and leaves. The work itself is in evaluation.py, edits.py, views.py and feeding.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from argosy.errors import LEFT_CODE, REFUSALS, ConfigError
from argosy.train import edits, views
from argosy.train.crew import Stopped
from argosy.train.evaluation import Evaluation
from argosy.train.feeding import Feeding, Produce
from argosy.train.lanes import Loss
from argosy.train.parts import Parts
from argosy.train.seeds import seed_all
from argosy.train.transaction import Work

if TYPE_CHECKING:
    from argosy.train.steps import Step

T = TypeVar("T")
_LIVE = "live"
_LOOP = 0x100B


class Beside:
    """The part of a trainer that is not its loop."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._evaluation = Evaluation(parts, "train.tally")
        self._work: Work | None = None
        """The step under way: something of it is fed or computed."""
        self._step: Step | None = None
        self._turn = 0
        """Of that step: the same on every rank, whatever of it is committed or edited already."""
        self._num_seedings = 0
        """Of the generators that user code draws from, since the step began."""
        self._view = _LIVE
        """The weights that the model shows."""
        self._has_entered = False
        self._is_loop_over = False
        """User code has left its loop over steps, at its end or by `break`."""

    def feed(self, step: Step, produce: Produce, *, record: bool) -> None:
        """See Step.feed."""
        directory = Path(self.parts.run.directory) / "fed" if record else None
        self._work = self.parts.new_work(step.index, self._turn)
        self._work.feeding = Feeding(produce=produce, directory=directory)

    def evaluate(
        self, data: Any, fn: Loss | None = None, batches: int | None = None
    ) -> dict[str, float]:
        """Means of what `fn(model, batch)` returns, (sum, count) by name, over a data set; without `fn` the loss. All ranks share the work."""
        self._enter()
        self._refuse_inside("evaluate()")
        found = self._attempt(lambda: self._evaluation.run(data, fn, batches, self._view))
        self._give_streams()
        return found

    @contextmanager
    def edit(self) -> Iterator[dict[str, torch.Tensor]]:
        """`with trainer.edit() as params:` changes weights in place, by name, in a transaction; in the loop, before the step."""
        step = self._step
        if self.parts.replicated is not None:
            raise ConfigError(
                'trainer.edit() with layout="replicated"',
                fix="change the parameters themselves between step.gradients() and step.commit()",
            )
        self._refuse_inside("edit()")
        self._refuse_other_weights("edit()")
        if step is None or not step.is_open:
            raise ConfigError(
                "trainer.edit() outside a step", fix="use it in the loop over steps, before step()"
            )
        step.num_edits += 1
        with (
            self._saved_when_stopped(),
            edits.edit(self.parts, step.index, step.num_edits - 1) as found,
        ):
            yield found
        self._give_streams()

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """`with trainer.weights("ema"):` the model shows the averages, to be evaluated or saved."""
        self._enter()
        self._refuse_inside("weights()")
        self._refuse_other_weights("weights()")
        with views.shown(self.parts.memories.weights, self.parts.committed, name):
            self._view = name
            try:
                yield
            finally:
                self._view = _LIVE

    def save(self) -> None:
        """Save what is committed beside training, now, whatever the settings say; every rank calls it, the first one does it."""
        self._enter()
        if self.parts.crew.is_first_living and int(self.parts.committed.ledger["step"]):
            self.parts.saver.begin()

    def save_at_end(self, *, has_failed: bool = False) -> None:
        """The program has ended: save what it has trained. If it has failed, only when its loop is over: else a replacement goes on with it."""
        if not self._has_entered:
            return
        if not self.parts.settings.save_at_end:
            if not has_failed and self.parts.crew.is_first_living:
                self.parts.saver.end()
        elif not has_failed:
            self.parts.save_at_end()
        elif self._is_loop_over:
            self.parts.save_at_once()

    def _tell_if_done(self, count: int) -> None:
        """A run that was resumed after its end has nothing left to do: say so, once."""
        parts = self.parts
        step, is_new = parts.place()[0], parts.state.current()[0] == 0
        is_done = parts.run.resume_from is not None and is_new and step >= count
        if is_done and parts.crew.is_first_living:
            more = "to train on, ask for more"
            sys.stderr.write(f"argosy: the run is finished: {step} of {count} steps; {more}\n")

    def _enter(self) -> None:
        if not self._has_entered:
            self._has_entered = True
            self._attempt(self.parts.enter)

    def _attempt(self, action: Callable[[], T]) -> T:
        with self._saved_when_stopped():
            return action()

    @contextmanager
    def _saved_when_stopped(self) -> Iterator[None]:
        """When the run is to stop, save and leave; when it cannot go on, save what it has come to."""
        try:
            yield
        except Stopped:
            self.parts.ahead.close()
            self.parts.crew.roster.leave_loop(self.parts.crew.rank)
            self.parts.save()
            raise SystemExit(LEFT_CODE)
        except REFUSALS:
            self.parts.save_at_once()
            raise

    def _give_streams(self, *, is_new_step: bool = False) -> None:
        """Seed the generators that user code goes on with: by the step and what it has called in it, not by the lanes that this rank happened to compute."""
        self._num_seedings = 0 if is_new_step else self._num_seedings + 1
        seed_all(self.parts.run.seed, self._turn, self._num_seedings, _LOOP)

    def _refuse_inside(self, what: str) -> None:
        if self._work is not None:
            raise ConfigError(f"{what} after an update or a feed", fix="commit the step first")

    def _refuse_other_weights(self, what: str) -> None:
        if self._view != _LIVE:
            raise ConfigError(f"{what} with weights {self._view!r}", fix="leave the block first")
