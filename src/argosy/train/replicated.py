"""`layout="replicated"`: steps in which user code updates private parameters itself, from gradients that are the same on every rank.

Each call of `step.gradients()` is a round without pages: lanes are computed at the weights of this moment, gathered, and every rank adds all of them for itself; the next round begins when all have. At the
commit owners write their share of the private state into the next version. Who has died is done without, at any point; who joins takes part from the next turn on, since only then weights are those
of a version. Called by trainer.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from argosy.errors import ConfigError, MismatchError
from argosy.move.rounds import Round
from argosy.train.crew import Moved
from argosy.train.images import Image
from argosy.train.judgement import Outcome
from argosy.train.lanes import Loss
from argosy.train.memories import IMAGE, Version
from argosy.train.participants import MOST_CALLS, Participants
from argosy.train.replicas import Replica
from argosy.train.roster import EDIT
from argosy.train.seeds import mix, seed_all
from argosy.train.transaction import ATTEMPT_BITS, Transaction, Work

_SALT = 0x5EED


class Call:
    """One call of step.gradients()."""

    def __init__(self, number: int, loss: Loss) -> None:
        self.number = number
        self.loss = loss
        self.outcome: Outcome | None = None
        """Set when this rank has added up all lanes."""


class Replicated(Transaction):
    """This rank's part in the steps of a replicated trainer."""

    def __init__(
        self, *given: Any, replica: Replica, participants: Participants, seed: int
    ) -> None:
        super().__init__(*given)
        self.replica = replica
        self._participants = participants
        self._seed = seed
        self._turn = -1
        self._pids: frozenset[int] = frozenset()
        self._calls: list[Call] = []
        self._shown = (-1, 0)

    # --- what the trainer calls ---------------------------------------------------------------

    def enter(self) -> None:
        """Take part for the first time: with the committed state."""
        super().enter()
        self._load()

    def begin_turn(self, place: Callable[[], tuple[int, int]]) -> None:
        """Return when this process takes part in the turn that `place` tells, and has its weights; one that came too late waits for the next."""
        self.persist(lambda: self._take_part(place))
        seed_all(self._seed, self._turn, _SALT)

    def gradients(self, work: Work, loss: Loss) -> Outcome:
        """Compute all lanes at the present weights, and give each parameter its gradient."""
        call = Call(len(self._calls), loss)
        if call.number + 1 > MOST_CALLS - 1:
            raise ConfigError(
                f"more than {MOST_CALLS - 1} calls of step.gradients() in step {work.step}",
                fix="commit now and then: LBFGS(max_eval=…) bounds its calls",
            )
        with torch.enable_grad():
            self.persist(lambda: self._run_call(work, call))
        assert call.outcome is not None
        self._calls.append(call)
        # Ranks have computed other lanes: whatever user code draws now is the same on all of them.
        seed_all(self._seed, self._turn, call.number + 1, _SALT)
        return call.outcome

    def commit(self, work: Work) -> None:
        """Make the private state the next version."""
        self._injector.pass_by("update", work.step)
        image = self.replica.image()
        checksum = mix(self.replica.checksum, image.checksum if image else 0)

        def finish() -> None:
            self._compare(work, checksum)
            if self._state.current()[0] == work.version:
                self.check_crew(work.step)
                self._store(work, image)
            self._flip(work)

        self.conclude(work, finish)
        self._shown = (work.version + 1, work.step + 1)

    # --- who takes part -----------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The living ranks that take part in the turn."""
        members = self.crew.members
        if not self._pids:
            return members
        return tuple(rank for rank in members if self.crew.pid_of(rank) in self._pids)

    @property
    def shown(self) -> tuple[int, int]:
        """(version, step) that the private weights are of."""
        return self._shown

    def settle(self) -> None:
        """The same, and say again what this rank has read: it may have another number now."""
        super().settle()
        if self._calls:
            self._mark(self._calls[-1])

    def refresh(self) -> None:
        """Private weights are not derived from the version, they become it."""

    def _refresh_alone(self) -> None:
        pass

    def _take_part(self, place: Callable[[], tuple[int, int]]) -> None:
        crew = self.crew
        while True:
            _, turn = place()
            living = [crew.pid_of(rank) for rank in crew.members]
            found = self._participants.agree(turn, crew.rank, living)
            if found is not None and os.getpid() in found:
                break
            if found is not None:
                self._wait_turn(place, turn)
        self._turn, self._pids, self._calls = turn, frozenset(found), []
        self._holdings.forget()
        self._load()

    def _wait_turn(self, place: Callable[[], tuple[int, int]], turn: int) -> None:
        """The others are in the middle of a step: until it is committed, or none of them is left."""

        def wait(deadline: float) -> None:
            self._exchange.wait_for(
                lambda: place()[1] != turn, f"turn {turn} is not committed", deadline=deadline
            )

        self.patience.wait(wait, list)

    def _load(self) -> None:
        if self._state.current()[0] == self._shown[0]:
            return
        version, slot = self._state.pin()
        try:
            found = self._memories.version(slot)
            self.replica.load(found)
            self._shown = version, int(found.ledger["step"])
        finally:
            self._state.unpin(version)

    # --- a round ------------------------------------------------------------------------------

    @property
    def _values_before(self) -> Callable[[str], torch.Tensor]:
        return self.replica.values.__getitem__

    def _run_call(self, work: Work, call: Call) -> None:
        self.check_crew(work.step)
        if call.outcome is None:
            self._add_up(work, call)
        self._mark(call)
        # Slots are used again in the next round, and nobody can make this one's blocks any more: the weights change.
        self.patience.wait(
            lambda deadline: self._exchange.wait_for(
                lambda: not self._late(call),
                f"ranks {self._late(call)} have not read the gradients of step {work.step}",
                deadline=deadline,
            ),
            lambda: self._late(call),
        )

    def _add_up(self, work: Work, call: Call) -> None:
        attempt = self._exchange_attempt(work)
        step = attempt << ATTEMPT_BITS | work.step
        round = Round(work.version, step, len(self._layout.pages_of_parts) + call.number)
        self._compute(work, round, call.loss, attempt)
        gathered = self._wait_lanes(round)
        self._audit(work, gathered, call.loss)
        flat = torch.empty(
            self._layout.num_elements
        )  # user code may keep gradients of the last one
        pages = list(range(self._layout.num_pages))
        partials = self._advance.norms_of(pages, self._exchange.reduce(gathered, pages, flat))
        self._injector.pass_by("vote", work.step)
        ledger = self._memories.version(self._state.current()[1]).ledger
        outcome = self._judge.judge(work.step, gathered.terms, partials, ledger, attempt)
        if outcome["verdict"] == "again":
            self.crew.roster.compute_again(work.version, attempt + 1)
            raise Moved
        self.crew.tell(self._judge.remark(work.step, outcome, attempt, len(self.members)))
        if outcome["verdict"] == "go":
            self.replica.take_gradients(flat, gathered.touched, outcome["scale"])
        else:
            self.replica.drop_gradients()
        call.outcome = outcome

    def _mark(self, call: Call) -> None:
        self._participants.mark(self.crew.rank, self._turn, call.number)
        self._exchange.wake()

    def _late(self, call: Call) -> list[int]:
        return [
            rank
            for rank in self.members
            if not self._participants.has_marked(
                rank, self.crew.pid_of(rank), self._turn, call.number
            )
        ]

    # --- the commit ---------------------------------------------------------------------------

    def _compare(self, work: Work, checksum: int) -> None:
        """MismatchError when user code came to something else here than on another rank."""
        roster = self.crew.roster
        if roster.agree_on(work.version, EDIT, self.crew.rank, checksum) != checksum:
            raise MismatchError(
                f"the update of step {work.step} came to other values here than on another rank",
                fix="use torch's default generators, nothing of this process's own, and a state_dict() that has all of the optimizer's state",
            )

    def _store(self, work: Work, image: Image | None) -> None:
        old = self._memories.version(self._state.current()[1])
        outcomes = [call.outcome for call in self._calls if call.outcome is not None]
        is_bad = any(each["verdict"] != "go" for each in outcomes)
        outcome = {**outcomes[0], "verdict": "skip" if is_bad else "go"}

        def fill(new: Version, names: list[str]) -> None:
            self.replica.store(new, names)
            if image is not None:
                _store_share(image, new, names)
            if self._holdings.is_first_among(0, names):
                ledger = self._next_ledger(old, old, work, outcome)
                new.set_result(0, outcome)
                new.ledger = {**ledger, IMAGE: image.num_bytes} if image else ledger
            self._injector.pass_by("flip", work.step)

        self.write(work.version + 1, fill)


def _store_share(image: Image, version: Version, names: list[str]) -> None:
    """The pieces of an image that go with these parameters, dealt in turn: whoever has a parameter writes them."""
    order, mine = version.plan.names, set(names)
    places = [i for i in range(len(image.pieces)) if order[i % len(order)] in mine]
    image.write(version.room_for_image(image.num_bytes), places)
