"""The training loop: `for step in trainer.steps(n): result = step()`.

Hands out steps from the committed version on and gives results. A rank that replaces another makes the same trainer and finds its place; one that is asked to stop saves and leaves.
What happens inside a step is in transaction.py, who takes part in crew.py, where everything lies in memories.py, what else a trainer does in beside.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from argosy.errors import ConfigError
from argosy.train import digests
from argosy.train.beside import Beside
from argosy.train.lanes import Loss
from argosy.train.parts import Parts
from argosy.train.settings import Settings, resolve
from argosy.train.steps import Gradients, Result, Step, gradients_of, result_of
from argosy.train.updates import Factory


class Trainer(Beside):
    """Model, data, loss and optimizer, trained together by all ranks of the run."""

    def __init__(
        self,
        run: Any,
        *,
        model: torch.nn.Module,
        data: Any,
        loss: Loss,
        optimizer: Factory | Mapping[str, Factory] | None = None,
        settings: Settings | None = None,
        **given: Any,
    ) -> None:
        self.run, self.model, self.loss = run, model, loss
        self.settings = resolve(settings, given)
        super().__init__(Parts(run, model, data, loss, optimizer, self.settings))

    def steps(self, count: int) -> Iterator[Step]:
        """Steps from the committed one on, until `count` are done."""
        self._enter()
        self._is_loop_over = False
        try:
            self._tell_if_done(count)
            while (index := self._next_step()) < count:
                self.run.step = index
                self._give_streams(is_new_step=True)
                self._step = step = Step(self, index)
                yield step
                if step.result is None:
                    raise ConfigError(
                        f"step {index} was not committed in the loop",
                        fix="call step(), or step.update() or step.gradients() and step.commit(), for every step",
                    )
                if step.result.is_rewound:
                    self.run.go_back(self.step)
            self.run.step = self.step
            self._give_streams(is_new_step=True)
        finally:
            self._is_loop_over = True
            self.parts.crew.roster.leave_loop(self.parts.crew.rank)

    def compute(self, step: Step, part: int, loss: Loss | None) -> None:
        """One update of a step; called by it."""
        if self.parts.replicated is not None:
            raise ConfigError(
                'step.update() with layout="replicated"',
                fix="call step.gradients(), update the parameters yourself, then step.commit()",
            )
        crew = self.parts.crew
        crew.roster.enter_step(crew.rank)
        self._refuse_other_weights("a step")
        self._work = self._work or self.parts.new_work(step.index, self._turn)
        work, loss = self._work, loss or self.loss
        self._attempt(lambda: self.parts.transaction.update(work, part, loss))
        if self.num_parts > 1:
            self._give_streams()

    def gradients(self, step: Step, loss: Loss | None) -> Gradients:
        """Gradients for user code's own update; called by a step."""
        replicated, crew = self.parts.replicated, self.parts.crew
        if replicated is None:
            raise ConfigError(
                'step.gradients() with layout="shared"',
                fix='use step(), or run.trainer(layout="replicated") for updates of your own',
            )
        crew.roster.enter_step(crew.rank)
        self._work = self._work or self.parts.new_work(step.index, self._turn)
        work, loss = self._work, loss or self.loss
        outcome = self._attempt(lambda: replicated.gradients(work, loss))
        crew.roster.leave_step(crew.rank)  # what user code does now may take its time
        return gradients_of(outcome)

    def finish(self, step: Step, seconds: float) -> Result:
        """Commit a step and read what it came to; called by it."""
        work, self._work = self._work, None
        assert work is not None
        self.parts.crew.roster.enter_step(self.parts.crew.rank)
        self._attempt(lambda: self.parts.transaction.commit(work))
        self.parts.transaction.patience.learn(seconds)
        self.parts.load_buffers()
        self.run.gang.step(self.step)
        self.run.note_lasting()
        version = self.parts.committed
        result = result_of(step.index, [version.result(p) for p in range(self.num_parts)], seconds)
        if result.is_rewound:
            self.parts.restore_state()
        self.parts.crew.roster.leave_step(self.parts.crew.rank)
        self._give_streams()
        return result

    @property
    def step(self) -> int:
        """Steps that are committed."""
        return int(self.parts.committed.ledger["step"])

    @property
    def num_parts(self) -> int:
        """Updates in a step: one for each optimizer."""
        return len(self.parts.exchange.layout.pages_of_parts)

    @property
    def optimizer(self) -> Any:
        """With `layout="replicated"`: what `optimizer=` made, for user code to step; a dictionary if it made several."""
        if self.parts.replicated is None:
            raise ConfigError(
                'trainer.optimizer with layout="shared"',
                fix="step() makes the update; owners have their own copies of the optimizer",
            )
        return self.parts.replicated.replica.optimizer

    @property
    def is_first(self) -> bool:
        """Whether this process is the lowest of the living ranks: who prints and writes."""
        members = self.parts.transaction.members
        return not members or members[0] == self.parts.crew.rank

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
        return self.parts.crew.roster.agree(self._turn, number, self.run.gang.rank, value)

    def _next_step(self) -> int:
        step, self._turn = self._attempt(self.parts.begin_turn)
        return step
