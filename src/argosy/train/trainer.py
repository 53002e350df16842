"""The training loop: `for step in trainer.steps(n): result = step()`.

Hands out steps from the committed version on and gives results. A rank that replaces another makes the same trainer and finds its place; one that is asked to stop saves and leaves.
What happens inside a step is in transaction.py, who takes part in crew.py, where everything lies in memories.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from argosy.errors import REFUSALS, ConfigError
from argosy.train import digests, edits, views
from argosy.train.crew import Stopped
from argosy.train.evaluation import Evaluation
from argosy.train.feeding import Feeding, Produce
from argosy.train.lanes import Loss
from argosy.train.parts import Parts
from argosy.train.settings import Settings, resolve
from argosy.train.steps import Result, Step, result_of
from argosy.train.transaction import Work
from argosy.train.updates import Factory

T = TypeVar("T")
LEFT_CODE = 143
"""As of a process that SIGTERM has ended: saved and left, but not done."""


class Trainer:
    """Model, data, loss and optimizer, trained together by all ranks of the run."""

    def __init__(
        self,
        run: Any,
        *,
        model: torch.nn.Module,
        data: Any,
        loss: Loss,
        optimizer: Factory | Mapping[str, Factory],
        settings: Settings | None = None,
        **given: Any,
    ) -> None:
        self.run, self.model, self.loss = run, model, loss
        self.settings = resolve(settings, given)
        self.parts = Parts(run, model, data, loss, optimizer, self.settings)
        self._evaluation = Evaluation(self.parts, "train.tally")
        self._work: Work | None = None
        self._step: Step | None = None
        self._view = "live"
        self._has_entered = False

    def steps(self, count: int) -> Iterator[Step]:
        """Steps from the committed one on, until `count` are done."""
        self._enter()
        while (index := self.step) < count:
            self.run.step = index
            self._step = step = Step(self, index)
            yield step
            if step.result is None:
                raise ConfigError(
                    f"step {index} was not committed in the loop",
                    fix="call step(), or step.update() and step.commit(), for every step",
                )
        self.run.step = self.step

    def compute(self, step: Step, part: int, loss: Loss | None) -> None:
        """One update of a step; called by it."""
        if self._view != "live":
            raise ConfigError(f"a step with weights {self._view!r}", fix="leave the block first")
        self._work = self._work or self.parts.new_work(step.index)
        work, loss = self._work, loss or self.loss
        self._attempt(lambda: self.parts.transaction.update(work, part, loss))

    def finish(self, step: Step, seconds: float) -> Result:
        """Commit a step and read what it came to; called by it."""
        work, self._work = self._work, None
        assert work is not None
        self._attempt(lambda: self.parts.transaction.commit(work))
        self.parts.transaction.patience.learn(seconds)
        self.parts.load_buffers()
        self.run.gang.step(self.step)
        version = self.parts.committed
        result = result_of(step.index, [version.result(p) for p in range(self.num_parts)], seconds)
        if result.is_rewound:
            self.parts.restore_state()
        return result

    def feed(self, step: Step, produce: Produce, *, record: bool) -> None:
        """See Step.feed."""
        if self.settings.counts is not None:
            raise ConfigError(
                "counts= with step.feed()", fix="let the loss return one (sum, count)"
            )
        directory = Path(self.run.directory) / "fed" if record else None
        self._work = self.parts.new_work(step.index)
        self._work.feeding = Feeding(produce=produce, directory=directory)

    def evaluate(
        self, data: Any, fn: Loss | None = None, batches: int | None = None
    ) -> dict[str, float]:
        """Means of what `fn(model, batch)` returns, (sum, count) by name, over a data set; without `fn` the loss. All ranks share the work."""
        self._enter()
        self._refuse_inside("evaluate()")
        return self._attempt(lambda: self._evaluation.run(data, fn, batches, self._view))

    @contextmanager
    def edit(self) -> Iterator[dict[str, torch.Tensor]]:
        """`with trainer.edit() as params:` changes weights in place, by name, in a transaction; in the loop, before the step."""
        step = self._step
        self._refuse_inside("edit()")
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

    @contextmanager
    def weights(self, name: str) -> Iterator[None]:
        """`with trainer.weights("ema"):` the model shows the averages, to be evaluated or saved."""
        self._enter()
        self._refuse_inside("weights()")
        with views.shown(self.parts.memories.weights, self.parts.committed, name):
            self._view = name
            try:
                yield
            finally:
                self._view = "live"

    @property
    def step(self) -> int:
        """Steps that are committed."""
        return int(self.parts.committed.ledger["step"])

    @property
    def num_parts(self) -> int:
        """Updates in a step: one for each optimizer."""
        return len(self.parts.updaters)

    @property
    def is_first(self) -> bool:
        """Whether this process is the lowest of the living ranks: who prints and writes."""
        crew = self.parts.crew
        return not crew.members or crew.position == 0

    def part_of(self, optimizer: str | None, made: int) -> int:
        """The number of an optimizer's part; without a name the next one."""
        if optimizer is None:
            return made
        names = [updater.name for updater in self.parts.updaters]
        if optimizer not in names:
            raise ConfigError(f"no optimizer {optimizer!r}", fix=f"there are {', '.join(names)}")
        return names.index(optimizer)

    def digest(self) -> str:
        """SHA-256 of parameters, optimizer state and buffers of the committed version."""
        return digests.of_version(self.parts.committed)

    def statistics(self) -> dict[str, int]:
        """Counts of the run so far, of all ranks together."""
        return {"lanes_recomputed": self.parts.crew.roster.taken_over}

    def agree(self, number: int, value: Any) -> Any:
        """See Step.agree."""
        version = self.parts.state.current()[0]
        return self.parts.crew.roster.agree(version, number, self.run.gang.rank, value)

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
            self.parts.save()
            raise SystemExit(LEFT_CODE)
        except REFUSALS:
            self.parts.save_at_once()
            raise

    def _refuse_inside(self, what: str) -> None:
        if self._work is not None:
            raise ConfigError(f"{what} after an update or a feed", fix="commit the step first")
