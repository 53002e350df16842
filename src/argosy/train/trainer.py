"""The training loop: `for step in trainer.steps(n): result = step()`.

Puts the parts together, hands out steps from the committed version on, and gives results. A rank that replaces another makes the same trainer and finds its place; one that is asked to stop saves and leaves.
What happens inside a step is in transaction.py, who takes part in crew.py, where everything lies in memories.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from argosy import data as sources
from argosy.data.prefetch import Ahead
from argosy.errors import ConfigError
from argosy.move import exchange
from argosy.train import assembly, digests, fingerprint, saves, seeds
from argosy.train.crew import Crew, Stopped
from argosy.train.lanes import BUFFER, Lanes, Loss
from argosy.train.memories import Memories, Version
from argosy.train.roster import Roster
from argosy.train.settings import Settings, resolve
from argosy.train.steps import Result, Step
from argosy.train.transaction import Transaction, Work
from argosy.train.updates import Factory

_PREFIX = "train"


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
        batch_size: int,
        lanes: int = 8,
        settings: Settings | None = None,
        **given: Any,
    ) -> None:
        self.run, self.model, self.loss = run, model, loss
        self.settings = resolve(settings, given)
        self.batch_size, self.lanes = batch_size, lanes
        assembly.prepare_numerics(self.settings)
        self.feed = sources.as_source(data).feed(batch_size=batch_size, lanes=lanes, seed=run.seed)
        self._ahead = Ahead(self.feed, depth=self.settings.prefetch * lanes)
        self._gang = run.gang
        if self._gang.world_size > lanes:
            raise ConfigError(
                f"{self._gang.world_size} ranks for {lanes} lanes",
                fix=f"use at most {lanes} ranks, or more lanes",
            )
        self._assemble(optimizer)

    # --- the loop -----------------------------------------------------------------------------

    def steps(self, count: int) -> Iterator[Step]:
        """Steps from the committed one on, until `count` are done; a step that was not made is made with the loss given."""
        self._enter()
        while (index := self.step) < count:
            self.run.step = index
            step = Step(self, index)
            yield step
            if step.result is None:
                raise ConfigError(
                    f"step {index} was neither made nor committed in the loop",
                    fix="call step(), or step.update() and step.commit(), for every step",
                )
        self._ahead.close()

    def compute(self, step: Step, part: int, loss: Loss | None) -> None:
        """One update of a step; called by it."""
        self._guarded(lambda: self._transaction.update(self._work_of(step), part, loss or self.loss))

    def finish(self, step: Step, seconds: float) -> Result:
        """Commit a step and read what it came to; called by it."""
        work = self._work_of(step)
        slot = self._guarded(lambda: self._transaction.commit(work))
        version = self._memories.version(slot)
        while version.ledger["step"] <= step.index:
            # Somebody's edit was committed meanwhile: this step begins again from there.
            work = self._new_work(step.index, work.losses)
            slot = self._guarded(lambda: self._transaction.commit(work))
            version = self._memories.version(slot)
        self._work = None
        self._transaction.patience.learn(seconds)
        self._load_buffers(slot)
        self._gang.step(step.index + 1)
        return _result(step.index, [version.result(p) for p in range(self.num_parts)], seconds)

    # --- what people ask ----------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that are committed."""
        return int(self._memories.version(self._state.current()[1]).ledger["step"])

    @property
    def num_parts(self) -> int:
        """Updates in a step."""
        return len(self._updaters)

    @property
    def is_first(self) -> bool:
        """Whether this process is the lowest of the living ranks: who prints and writes."""
        return not self._crew.members or self._crew.position == 0

    def part_of(self, optimizer: str | None, made: int) -> int:
        """The number of an optimizer's part; without a name the next one."""
        if optimizer is None:
            return made
        names = [updater.name for updater in self._updaters]
        if optimizer not in names:
            raise ConfigError(f"no optimizer {optimizer!r}", fix=f"there are {', '.join(names)}")
        return names.index(optimizer)

    @property
    def crew(self) -> Crew:
        """Who takes part."""
        return self._crew

    def pin(self) -> tuple[int, int]:
        """Keep the committed version: (version, slot)."""
        return self._state.pin()

    def unpin(self, version: int) -> None:
        """Give it back."""
        self._state.unpin(version)

    def version_in(self, slot: int) -> Version:
        """The state in a slot."""
        return self._memories.version(slot)

    def facts(self) -> dict[str, Any]:
        """What must be the same when the run is resumed."""
        return {"data": self.feed.fingerprint, "fingerprint": self._fingerprint}

    def digest(self) -> str:
        """SHA-256 of parameters, optimizer state and buffers of the committed version."""
        return digests.of_version(self._memories.version(self._state.current()[1]))

    def agree(self, number: int, value: Any) -> Any:
        """See Step.agree."""
        version = self._state.current()[0]
        return self._crew.roster.agree(version, number, self._gang.rank, value)

    # --- parts --------------------------------------------------------------------------------

    def _assemble(self, optimizer: Factory | Mapping[str, Factory]) -> None:
        settings, plain = self.settings, assembly.plain(self.model)
        trained = assembly.trained_of(plain)
        buffers = assembly.changing_buffers(plain, self._look_at_one_lane)
        self._updaters = assembly.make_updaters(optimizer, trained)
        plan = assembly.make_plan(trained, buffers, self._updaters, settings)
        layout = assembly.make_layout(plan, self._updaters, self.lanes, settings)
        saves.check_room(plan, layout, plain, settings)
        weights = assembly.make_weights(_PREFIX, plain, settings)
        self._memories = Memories(_PREFIX, weights, plan)
        initial = {BUFFER + name: buffer for name, buffer in buffers.items()}
        roster = Roster(
            f"{_PREFIX}.roster",
            most_ranks=settings.most_ranks,
            num_parameters=len(weights.parameters) + len(initial),
            title=layout.digest,
        )
        self._fingerprint = fingerprint.take(
            mode=settings.mode,
            threads=torch.get_num_threads(),
            compiled=plain is not self.model,
        )
        assembly.begin(self._memories, roster, plain, initial)
        shared = exchange.open(f"{_PREFIX}.exchange", layout, prefault=False)
        weights.bind()
        self._state = shared.state
        self._exchange = shared
        self._crew = Crew(self._gang, roster, shared)
        if hasattr(self._gang, "on_change"):
            self._gang.on_change(lambda _: shared.wake())
        self._lanes = Lanes(
            self.model, trained, layout, seed=self.run.seed, is_exact=settings.mode == "exact"
        )
        self._transaction = Transaction(
            self._crew, shared, self._memories, self._lanes, self._updaters, settings, self._batch
        )
        self._work: Work | None = None
        self._has_entered = False

    def _enter(self) -> None:
        """Take part: from here on others count on this rank."""
        if self._has_entered:
            return
        if self._state.current()[0] > 0:
            self._warm_up()
        self._has_entered = True
        self._guarded(self._transaction.enter)
        slot = self._state.current()[1]
        self._load_buffers(slot)
        self.run.state.restore(self._memories.version(slot).ledger.get("state", "").encode())

    def _warm_up(self) -> None:
        """A replacement computes one lane for nothing, so that its first real one is not slow."""
        seeds.seed_all(self.run.seed)
        total = self.loss(self.model, self.feed.batch(0, 0))
        total = next(iter(total.values())) if isinstance(total, Mapping) else total
        total[0].backward()
        for parameter in self.model.parameters():
            parameter.grad = None

    def _look_at_one_lane(self) -> None:
        self.model.train()
        self.loss(self.model, self.feed.batch(0, 0))

    def _work_of(self, step: Step) -> Work:
        if self._work is None:
            self._work = self._new_work(step.index, {})
        return self._work

    def _new_work(self, index: int, losses: dict[int, Loss]) -> Work:
        version, slot = self._state.current()
        ledger = self._memories.version(slot).ledger
        self._work = Work(version, index, index + len(ledger.get("omitted", [])))
        self._work.losses = dict(losses)
        self._work.ledger = lambda: {"state": self.run.state.snapshot().decode()}
        self._expect(self._work.index)
        return self._work

    def _batch(self, index: int, lane: int) -> Any:
        return self._ahead.take(index, lane)

    def _expect(self, index: int) -> None:
        """Let the batches of this step and of those that follow be made."""
        lanes = self._transaction.lanes_of_this_rank()
        ahead = range(index, index + self.settings.prefetch + 1)
        self._ahead.expect([(each, lane) for each in ahead for lane in lanes])

    def _load_buffers(self, slot: int) -> None:
        version = self._memories.version(slot)
        for name, buffer in self.model.named_buffers():
            if BUFFER + name in self._exchange.layout.indices:
                buffer.copy_(version.tensor(BUFFER + name))

    def _guarded(self, action: Callable[[], Any]) -> Any:
        """Do it; when the run is to stop, save and leave."""
        try:
            return action()
        except Stopped:
            self._leave()

    def _leave(self) -> None:
        self._ahead.close()
        saves.save_once(self)
        raise SystemExit(0)


def _result(step: int, parts: list[dict[str, Any]], seconds: float) -> Result:
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
        parts=tuple(parts),
    )
