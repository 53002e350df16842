"""One step on the exchange until it is committed, through deaths, hangs and changes of membership.

Lanes are computed and published, their sum is read by the owners of pages, the wait for the norm is the vote, owners write the next version, whoever sees all pages done flips it, and the weights are
derived anew. Whatever interrupts this, the membership settles and the step goes on from what is there: finished blocks, votes and pages stay valid. Every part may be repeated; none is ever done in place.
Called by steps.py; who computes what comes from shares.py, what follows from bad numbers from guards.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from argosy.errors import ConfigError, GenerationChanged, MismatchError, PeerLost, RoundOver
from argosy.move.exchange import Exchange, SlotClaim
from argosy.move.gathered import Gathered
from argosy.move.layout import Layout
from argosy.move.rounds import Round
from argosy.move.trees import Node, nodes_of
from argosy.train import audits, ledgers, recovery
from argosy.train.advances import Advance
from argosy.train.blocks import Blocks
from argosy.train.crew import Crew, Moved, Stopped
from argosy.train.feeding import Feeding
from argosy.train.fixed import FixedCrew
from argosy.train.holdings import Holdings
from argosy.train.injection import Injector
from argosy.train.integrity import Integrity
from argosy.train.judgement import NOTHING, Judge, Outcome
from argosy.train.lanes import Lanes, Loss, Terms
from argosy.train.memories import Memories, Version
from argosy.train.patience import Patience
from argosy.train.rewinds import Snapshots
from argosy.train.settings import Settings
from argosy.train.shares import owners_of_lanes, runs_of
from argosy.train.updates import Updater

ATTEMPT_BITS = recovery.ATTEMPT_BITS
_INTERRUPTIONS = (Moved, PeerLost, GenerationChanged)


class Work:
    """What one step is to do: for each part, the loss; and what is committed with it."""

    def __init__(self, version: int, step: int, index: int) -> None:
        self.version = version
        self.step = step
        self.index = index
        """Of the batch: the step plus the batches that were left out before it."""
        self.feeding: Feeding | None = None
        """Where its batches come from, when user code makes them."""
        self.totals: dict[str, float] | None = None
        """Denominators of named terms over all those batches."""
        self.losses: dict[int, Loss] = {}
        self.finished: set[tuple[int, int]] = set()
        """(part, membership) pairs of which this rank has done its share."""
        self.is_audited = False
        self.meant: frozenset[int] | None = None
        """Lanes that were this rank's when it began the step; others that it computes are taken over."""
        self.ledger: Callable[[], dict[str, Any]] = dict

    def before(self, part: int) -> list[int]:
        """The parts that come before this one, in the order of user code."""
        order = list(self.losses)
        return order[: order.index(part)]


class Transaction:
    """This rank's part in the steps of a run."""

    def __init__(
        self,
        crew: Crew,
        exchange: Exchange,
        memories: Memories,
        lanes: Lanes,
        updaters: list[Updater],
        settings: Settings,
        batch_of: Callable[[Work, int], Any],
    ) -> None:
        self.crew = crew
        self._exchange = exchange
        self._state = exchange.state
        self._layout: Layout = exchange.layout
        self._memories = memories
        self._lanes = lanes
        self._settings = settings
        self._batch_of = batch_of
        self.before_failing: Callable[[], None] = lambda: None
        """Called before the run is told that it cannot succeed."""
        self.before_lanes: Callable[[Work], None] = lambda work: None
        """Called before lanes are computed, when no slot is taken yet."""
        self._judge = Judge(settings)
        is_shared = settings.layout == "shared"
        self._integrity = Integrity(memories.weights) if is_shared else None
        self._snapshots = Snapshots(
            exchange.state, self._layout, memories, crew.roster, settings.guard
        )
        self._advance = Advance(self._layout, updaters, settings)
        self._holdings = Holdings(self._layout, lambda: self.members, lambda: self.position)
        self._injector = Injector(crew.gang)
        self._fixed = None if settings.recovery else FixedCrew(crew)
        self.patience = Patience(
            crew,
            first_seconds=settings.first_hang_seconds if settings.recovery else math.inf,
            more_seconds=settings.hang_seconds if settings.recovery else math.inf,
        )

    # --- what steps.py calls ------------------------------------------------------------------

    def update(self, work: Work, part: int, loss: Loss) -> None:
        """Compute a part of the step and write its pages of the next version."""
        work.losses[part] = loss
        self.persist(lambda: self._run_parts(work))

    def commit(self, work: Work) -> None:
        """Flip to the next version and derive the weights."""

        def finish() -> None:
            self._run_parts(work)
            self._flip(work)

        self.conclude(work, finish)

    def conclude(self, work: Work, finish: Callable[[], None]) -> None:
        """Let `finish` commit the step. Once it is committed a wish to stop waits: what user code does after a step belongs to it."""
        try:
            self.persist(finish)
        except Stopped:
            if self._state.current()[0] == work.version:
                raise
            self._refresh_alone()

    def enter(self) -> None:
        """Take part for the first time."""
        self._settle_persistently()

    def begin_turn(self, place: Callable[[], tuple[int, int]]) -> None:
        """A turn of the loop begins, of which `place` tells (step, turn). Weights are shared, so whoever comes may take part at once."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share the work of the step."""
        return self.crew.members

    @property
    def position(self) -> int:
        """Place of this rank among them."""
        return self.members.index(self.crew.rank)

    @property
    def shown(self) -> tuple[int, int]:
        """(version, step) of the weights that the model shows."""
        version, slot = self._state.current()
        return version, int(self._memories.version(slot).ledger["step"])

    def lanes_of_this_rank(self) -> list[int]:
        """The lanes that this rank is to compute in an ordinary step."""
        return [lane for first, count in self._blocks() for lane in range(first, first + count)]

    def settle(self) -> None:
        """Enter the membership that is there, and complete what a dead member left of the weights."""
        self.crew.settle(self.patience.wait)
        self._holdings.forget()
        self.refresh()

    def check_crew(self, step: int) -> None:
        """Without recovery: end the run if a rank has ended."""
        if self._fixed is not None:
            self._fixed.check(step)

    def heed_stop(self, place: Callable[[], tuple[int, int]]) -> None:
        """Without recovery: the moment at which a wish to stop is heeded; otherwise it is at any. `place` tells (step, turn)."""
        if self._fixed is not None:
            self._fixed.heed_stop(place()[1])

    # --- persistence --------------------------------------------------------------------------

    def persist(self, attempt: Callable[[], None]) -> None:
        """Try until nothing interrupts: whenever the membership has changed, settle and call it again."""
        while True:
            try:
                attempt()
                return
            except _INTERRUPTIONS:
                self._settle_persistently()

    def _settle_persistently(self) -> None:
        while True:
            try:
                self.settle()
                return
            except _INTERRUPTIONS:
                continue

    # --- a part of a step ---------------------------------------------------------------------

    def _run_parts(self, work: Work) -> None:
        for part, loss in work.losses.items():
            share = part, self.crew.num_moves
            if self._state.current()[0] > work.version:
                return
            if share in work.finished:
                continue
            self.check_crew(work.step)
            try:
                self._run_part(work, part, loss)
            except RoundOver:
                pass  # the others needed nothing more of this rank
            work.finished.add(share)

    def _run_part(self, work: Work, part: int, loss: Loss) -> None:
        attempt = self._exchange_attempt(work)
        round = Round(work.version, attempt << ATTEMPT_BITS | work.step, part)
        version, slot = self._state.current()
        if version > work.version or self._exchange.is_over(round):
            return
        old = self._memories.version(slot)
        if self._snapshots.is_rewound(work.before(part)):
            # What is bad in one part is undone in all of them, whether its own lanes are or not.
            self._write(work, part, None, {**NOTHING, "verdict": "rewind"})
            self._end_part(work, part, round)
            return
        self._compute(work, round, loss, attempt)
        gathered = self._wait_lanes(round)
        self._audit(work, gathered, loss)
        mine = self._holdings.pages(part)
        partials = self._exchange.reduce(gathered, mine, self._advance.gradients)
        self._injector.pass_by("vote", work.step)
        self._exchange.vote(round, mine, self._advance.norms_of(mine, partials))
        votes = self._wait_votes(round)
        # Not the committed one's: a rank whose pages nobody waits for may be late. Spikes are of the first loss.
        ledger = {**old.ledger, "losses": []} if part else old.ledger
        outcome = self._judge.judge(work.step, gathered.terms, votes, ledger, attempt)
        if outcome["verdict"] == "again":
            self.crew.roster.compute_again(work.version, attempt + 1)
            raise Moved
        self.crew.tell(self._judge.remark(work.step, outcome, attempt, len(self.members)))
        self._write(work, part, gathered, outcome)
        self._end_part(work, part, round)

    def _end_part(self, work: Work, part: int, round: Round) -> None:
        """Before another part takes the slots all pages of this one are done."""
        if len(work.before(part)) + 1 < len(self._layout.pages_of_parts):
            self.patience.wait(
                lambda deadline: self._state.wait_done(round, deadline=deadline),
                lambda: self._holdings.owners_of(self._state.undone(work.version + 1)),
            )

    def _exchange_attempt(self, work: Work) -> int:
        return self.crew.roster.attempt_of(work.version)

    def _compute(self, work: Work, round: Round, loss: Loss, attempt: int) -> None:
        """Compute and publish the blocks that are this rank's and not there yet."""
        try:
            if self._integrity is not None:
                self._integrity.check()
        except ConfigError:
            self._refuse_if_past(work)
            raise
        self.before_lanes(work)
        before = self._values_before
        if work.meant is None:
            work.meant = frozenset(self.lanes_of_this_rank())

        def fill(claim: SlotClaim) -> tuple[frozenset[str], Terms]:
            self._injector.pass_by("lane", work.step)
            try:
                return self._lanes.compute(
                    claim, work.step, loss, lambda lane: self._batch_of(work, lane), before
                )
            except BaseException as error:
                self.note_failure(work.step, self._lanes.lane, error)
                raise

        def published(claim: SlotClaim) -> None:
            self._injector.pass_by("publish", work.step, claim.flat)
            lanes = range(claim.node.first, claim.node.stop)
            self.crew.roster.count_taken_over(len(set(lanes) - (work.meant or set())))

        runs = self._blocks(attempt)
        nodes = [node for first, count in runs for node in self._nodes(first, count)]
        Blocks(self.crew, self._exchange, self.patience).compute(round, nodes, fill, published)

    def _refuse_if_past(self, work: Work) -> None:
        """RoundOver when the others, who needed nothing of this rank, have committed the step and changed the weights."""
        if self._state.current()[0] > work.version:
            raise RoundOver(f"step {work.step} was finished by others")

    def note_failure(self, step: int, lane: int, error: BaseException) -> None:
        """A lane raised. Here it ends this process; if it does so elsewhere too, no restart will help."""
        if isinstance(error, (*_INTERRUPTIONS, Stopped, KeyboardInterrupt, SystemExit)):
            return
        text = ": ".join(filter(None, (type(error).__name__, str(error))))
        attempt = os.environ.get("ARGOSY_ATTEMPT", str(os.getpid()))
        is_repeated = self.crew.roster.note_failure(step, lane, text, attempt)
        if recovery.judge_failure(is_repeated=is_repeated) == "fail":
            self.before_failing()
            self.crew.gang.fail(f"step {step}, lane {lane} raised on two ranks: {text}")

    def _audit(self, work: Work, gathered: Gathered, loss: Loss) -> None:
        """In the first step one block is computed once more, by another rank."""
        if work.version or work.is_audited or not self._settings.audit:
            return
        if not self._settings.recovery:
            return  # a rank without pages would compute with weights that are changing
        if self._settings.mode != "exact" or self.position != 1 % len(self.members):
            return
        work.is_audited = True
        block = gathered.blocks[0]
        claim = audits.PrivateClaim(gathered.round, block.node, self._layout)
        self._lanes.compute(
            claim,
            work.step,
            loss,
            lambda lane: self._batch_of(work, lane),
            self._values_before,
        )
        try:
            audits.compare(claim.flat, self._exchange.slot(block.slot), block.node, self._layout)
        except MismatchError:
            # A rank without pages is not waited for: weights may have changed, the slot may have another block by now.
            is_there = block in self._exchange.published(gathered.round)
            if is_there and not self._exchange.is_over(gathered.round):
                raise

    @property
    def _values_before(self) -> Callable[[str], torch.Tensor]:
        """Where lanes find the buffers to begin with."""
        return self._memories.version(self._state.current()[1]).tensor

    def _nodes(self, first: int, count: int) -> list[Node]:
        """The blocks of some lanes. Without a promise of bits all lanes of a subtree are added up in one slot: fewer are zeroed, written and read."""
        if self._settings.mode == "exact":
            return self._layout.blocks(first, count)
        return nodes_of(first, count, self._layout.num_lanes)

    def _blocks(self, attempt: int = 0) -> list[tuple[int, int]]:
        """(first, count) of the lanes of this rank; a step that is computed again is dealt to others."""
        return runs_of(
            self.position,
            len(self.members),
            self._layout.num_lanes,
            is_interim=self.crew.is_interim,
            attempt=attempt,
        )

    def _wait_lanes(self, round: Round) -> Gathered:
        attempt = round.step >> ATTEMPT_BITS
        owners = owners_of_lanes(
            self.members,
            self._layout.num_lanes,
            is_interim=self.crew.is_interim,
            attempt=attempt,
        )

        def wait(deadline: float) -> Gathered:
            self._move_on_from(round)
            return self._exchange.wait_lanes(round, deadline=deadline, owners=owners)

        return self.patience.wait(
            wait, lambda: sorted({owners[lane] for lane in self._exchange.missing(round)})
        )

    def _wait_votes(self, round: Round) -> list[float]:
        def wait(deadline: float) -> list[float]:
            self._move_on_from(round)
            votes = self._exchange.wait_votes(round, deadline=deadline)
            # A rank without lanes is not waited for: others of the next attempt may have voted while it read.
            self._move_on_from(round)
            return votes

        return self.patience.wait(
            wait, lambda: self._holdings.owners_of(self._exchange.unvoted(round))
        )

    def _move_on_from(self, round: Round) -> None:
        """Moved when the step is computed again: somebody has seen all votes of this attempt, and they were bad."""
        if self.crew.roster.attempt_of(round.version) > round.step >> ATTEMPT_BITS:
            raise Moved

    def _write(self, work: Work, part: int, gathered: Gathered | None, outcome: Outcome) -> None:
        """Make this rank's pages of the next version."""
        snapshot = None
        if outcome["verdict"] == "rewind":
            snapshot = self._snapshots.agree(work.version, self.crew.rank)
            outcome["verdict"] = "skip" if snapshot is None else "rewind"
        old = self._memories.version(self._state.current()[1])
        source = old if snapshot is None else self._memories.version(snapshot)

        def fill(new: Version, names: list[str]) -> None:
            if outcome["verdict"] == "go":
                assert gathered is not None
                touched, scale = gathered.touched, outcome["scale"]
                self._advance.write(part, (old, new), names, touched, scale, work.step)
            else:
                new.copy_from(source, *names)
            if outcome["verdict"] == "rewind":
                self._snapshots.undo(work.before(part), source, new)
                if work.before(part):
                    new.ledger = self._next_ledger(old, source, work, outcome)
            if self._holdings.is_first_among(part, names):
                new.set_result(part, outcome)
                if part == 0:
                    new.ledger = self._next_ledger(old, source, work, outcome)
            self._injector.pass_by("flip", work.step)

        self._injector.pass_by("update", work.step)
        self.write(work.version + 1, fill, part)

    def write(
        self, version: int, fill: Callable[[Version, list[str]], None], part: int | None = None
    ) -> None:
        """Let `fill(new, names)` make those of this rank's parameters that the next version lacks, of one part or of all."""
        names = self._holdings.mine_among(self._state.undone(version), part)
        if not names:
            return
        slot = self.patience.wait(
            lambda deadline: self._state.begin(version, deadline=deadline), self._pinning
        )
        fill(self._memories.version(slot), names)
        self._state.mark_done(version, self._holdings.pages_of(names))

    def _next_ledger(
        self, old: Version, source: Version, work: Work, outcome: Outcome
    ) -> ledgers.Ledger:
        if outcome["verdict"] == "rewind":
            return ledgers.after_rewind(old.ledger, source.ledger, work.step, work.index)
        guard = self._settings.guard
        return ledgers.after_step(old.ledger, work.step, work.ledger(), outcome, guard)

    # --- the flip -----------------------------------------------------------------------------

    def _flip(self, work: Work) -> None:
        self.wait_flip(work.version + 1)
        self._injector.pass_by("refresh", work.step)
        self.refresh()

    def wait_flip(self, version: int) -> None:
        """Commit a version with the others, unless it is."""
        if self._state.current()[0] < version:
            self.patience.wait(
                lambda deadline: self._state.wait_flip(version, deadline=deadline),
                lambda: self._holdings.owners_of(self._state.undone(version)),
            )

    def refresh(self) -> None:
        """Derive this rank's share of the weights from the committed version, and wait for the others'."""
        version, slot = self._state.current()
        stale = self._state.unrefreshed(version)
        if stale:
            self._derive(version, slot, self._holdings.mine_among(stale))
        self.patience.wait(
            lambda deadline: self._state.wait_refreshed(version, deadline=deadline),
            lambda: self._holdings.owners_of(self._state.unrefreshed(version)),
        )
        self._note_weights(version, slot)

    def _refresh_alone(self) -> None:
        """Derive all weights that are not, and wait for nobody: the others may be leaving. Whoever else is at it writes the same bytes."""
        version, slot = self._state.current()
        parameters, stale = self._layout.parameters, self._state.unrefreshed(version)
        names = {parameters[self._layout.parameter_of(page)].name for page in stale}
        self._derive(version, slot, sorted(names))
        self._note_weights(version, slot)

    def _derive(self, version: int, slot: int, names: list[str]) -> None:
        self._memories.refresh(slot, names)
        self._state.mark_refreshed(version, self._holdings.pages_of(names))

    def _note_weights(self, version: int, slot: int) -> None:
        self._snapshots.keep(version, slot)
        if self._integrity is not None:
            self._integrity.note()

    def _pinning(self) -> list[int]:
        """The members that pin versions."""
        return [rank for rank in self._state.pins() if rank in self.crew.members]
