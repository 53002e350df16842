"""The parts of a trainer in this process, put together once: memories, exchange, crew, lanes, transaction.

Made by trainer.py, also in replacements, which find what is shared. Holds them and answers what the committed version says; how a step is made is in transaction.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from argosy import data as sources
from argosy.checkpoint import names
from argosy.checkpoint.events import Advance, Event, describe
from argosy.data.prefetch import Ahead
from argosy.errors import ArgosyError, ConfigError
from argosy.move import exchange
from argosy.train import assembly, fingerprint, ledgers, modes, replicas, room, saver, seeds
from argosy.train.checkpoints import Checkpoints, attachments_of
from argosy.train.crew import Crew
from argosy.train.feeding import Pantry, Unfed
from argosy.train.guards import batch_of_step
from argosy.train.lanes import BUFFER, Lanes, Loss
from argosy.train.memories import Version
from argosy.train.participants import Participants
from argosy.train.replicated import Replicated
from argosy.train.roster import Roster
from argosy.train.saver import Saver
from argosy.train.settings import Settings
from argosy.train.shares import owners_of_lanes
from argosy.train.storedstate import StoredVersion
from argosy.train.totals import Counted, totals_of
from argosy.train.transaction import Transaction, Work
from argosy.train.turns import Turns
from argosy.train.updates import Factory

_LOG = logging.getLogger("argosy.train")
_PREFIX = "train"
_BODY_SECONDS = 5.0
"""So long a stop waits for code after a step that others have begun."""


class Parts:
    """Everything of one trainer in one process."""

    def __init__(
        self,
        run: Any,
        model: torch.nn.Module,
        data: Any,
        loss: Loss,
        optimizer: Factory | Mapping[str, Factory] | None,
        settings: Settings,
    ) -> None:
        self.run, self.model, self.loss, self.settings = run, model, loss, settings
        lanes = settings.lanes
        _check_arguments(model, loss)
        assembly.prepare_numerics(settings)
        assembly.prepare_compiler(settings)
        _check_ranks(run.gang.world_size, lanes)
        self._tell_bounds()
        self.feed = _make_feed(data, settings, run.seed)
        self.ahead = Ahead(self.feed, depth=settings.prefetch * lanes)
        self._counted = Counted(self.ahead, settings.counts, lanes)
        self._pantry = Pantry(_PREFIX, lanes, run.seed)
        plain = assembly.plain(model)
        trained = assembly.trained_of(plain)
        buffers = assembly.changing_buffers(
            plain, None if isinstance(self.feed, Unfed) else self._look_at_one_lane
        )
        is_shared = settings.layout == "shared"
        self.updaters = assembly.make_updaters(optimizer, trained) if is_shared else []
        if is_shared:
            plan = assembly.make_plan(trained, buffers, self.updaters, settings)
        else:
            plan = replicas.make_plan(trained, buffers)
        layout = assembly.make_layout(plan, self.updaters, lanes, settings)
        room.check(plan, layout, plain, settings, _PREFIX)
        num_parts = len(self.updaters)
        self.memories = assembly.make_memories(_PREFIX, plain, plan, settings, num_parts)
        self.fingerprint = fingerprint.take(
            mode=settings.mode,
            threads=torch.get_num_threads(),
            compiled=assembly.is_compiled(model),
        )
        self._facts = {
            "data": self.feed.fingerprint,
            "feed": self.feed.describe(),
            "fingerprint": self.fingerprint,
        }
        roster = Roster(
            f"{_PREFIX}.roster",
            most_ranks=settings.most_ranks,
            num_parameters=len(self.memories.weights.parameters) + len(buffers),
            title=layout.digest,
        )
        assembly.begin(self.memories, roster, buffers, self._restore)
        self.memories.weights.bind()
        self.exchange = exchange.open(f"{_PREFIX}.exchange", layout, prefault=False)
        self.state = self.exchange.state
        self.crew = Crew(run.gang, roster, self.exchange)
        run.gang.on_change(lambda _: self.crew.hear())
        self._turns = Turns(f"{_PREFIX}.turns", most_ranks=settings.most_ranks)
        self.saver = Saver(
            run,
            settings.checkpoints,
            self.state,
            layout.num_owners - 2,
            self.memories,
            self._stored,
            attachments_of(settings.checkpoints, plain),
        )
        self.saver.listener = self._hear_save
        self.saver.checkpointer.reports.watcher = self._watch_save
        self._turn: int | None = None
        """The last one that this process has begun."""
        self._first_state = b""
        """What user code had put into its state before the first step."""
        is_exact = settings.mode == "exact"
        self.lanes = Lanes(model, trained, layout, seed=run.seed, is_exact=is_exact)
        given = (
            self.crew,
            self.exchange,
            self.memories,
            self.lanes,
            self.updaters,
            settings,
            self.batch,
        )
        self.replicated: Replicated | None = None
        """The transaction again, where user code makes the updates."""
        if is_shared:
            self.transaction = Transaction(*given)
        else:
            self.transaction = self.replicated = Replicated(
                *given,
                replica=replicas.Replica(trained, buffers, optimizer, layout),
                participants=Participants(
                    f"{_PREFIX}.participants", most_ranks=settings.most_ranks
                ),
                seed=run.seed,
            )
            # One that has joined and waits for the next step has nothing to write of this one.
            run.writers = lambda: self.transaction.members
        self.transaction.before_failing = self.save_at_once
        self.transaction.before_lanes = self._prepare_batches
        if self.state.current()[0] > 0:
            _LOG.info(
                "step %d is in the memory of this host: it goes on from there", self.place()[0]
            )
            # From here on a wish to stop is heeded: who comes first may be the only one who can save.
            _ = run.gang.stopping

    # --- the committed version ----------------------------------------------------------------

    @property
    def committed(self) -> Version:
        """The state that is committed now."""
        return self.memories.version(self.state.current()[1])

    def place(self) -> tuple[int, int]:
        """(step, turn) that come next: a turn is a step that was made, so it never goes back."""
        ledger = self.committed.ledger
        return int(ledger["step"]), int(ledger.get("turn", 0))

    def begin_turn(self) -> tuple[int, int]:
        """(step, turn) that come next, with the state of user code as it is then on every rank."""
        self.transaction.begin_turn(self.place)
        step, turn = self.place()
        if not ledgers.is_of_loop(self._turn, turn):
            step, turn = self._join_turn()
        self._turn = turn
        self._turns.offer(turn, self.crew.rank, self.run.state.snapshot())
        # Not before: what is saved on a stop goes on with the state that was offered.
        self.transaction.heed_stop(self.place)
        self.saver.tend(step, lambda: self.crew.is_first_living)
        return step, turn

    def _join_turn(self) -> tuple[int, int]:
        """Give user code the state with which the turn under way began; wait while a member has yet to begin it."""
        found: list[tuple[int, int, bytes | None]] = []

        def look(deadline: float) -> None:
            while True:
                step, turn = self.place()
                body = self._turns.find(turn)
                if body is not None or turn == 0 or self._is_unknown(turn):
                    found[:] = [(step, turn, body)]
                    return
                self.exchange.wait_progress(deadline=deadline)

        self.transaction.persist(lambda: self.transaction.patience.wait(look, list))
        step, turn, body = found[0]
        if body is not None:
            self.run.state.restore(body)
        elif turn:
            self.restore_state()
        return step, turn

    def _is_unknown(self, turn: int) -> bool:
        """Whether all members have come to a turn from elsewhere."""
        crew = self.crew
        if self._turns.ask(turn, crew.rank):
            self.exchange.wake()
        return all(
            self._turns.asks(turn, rank, crew.pid_of(rank)) for rank in self.transaction.members
        )

    def new_work(self, step: int, turn: int) -> Work:
        """A step from the committed version."""
        version, slot = self.state.current()
        ledger = self.memories.version(slot).ledger
        version = ledgers.version_of_turn(version, ledger, turn)
        work = Work(version, step, batch_of_step(step, ledger.get("omitted", [])))
        work.ledger = lambda: {"state": self.run.state.snapshot().decode()}
        self._expect(work.index)
        return work

    def enter(self) -> None:
        """Take part: from here on others count on this rank."""
        self.crew.check_stop()
        if self.state.current()[0] > 0:
            self._warm_up()
        self.run.gang.entered()
        self.transaction.enter()
        self.load_buffers()
        self._first_state = self.run.state.snapshot()
        self.restore_state()
        # What is there now stays: the collector need not look at it again in every step.
        gc.collect()
        gc.freeze()

    def load_buffers(self) -> None:
        """Give the module the committed values of the buffers that forward changes."""
        if self.replicated is not None or not self.lanes.has_buffers:
            return  # there they are private, like the weights
        version = self.committed
        for name, buffer in assembly.plain(self.model).named_buffers():
            if BUFFER + name in self.exchange.layout.indices:
                buffer.copy_(version.tensor(BUFFER + name))

    def save(self) -> None:
        """Save the committed version, on one of the ranks that call this at once."""
        deadline = time.monotonic() + _BODY_SECONDS
        path = self.saver.save_once(
            lambda: self.crew.is_first_living,
            lambda version: self._has_begun(version) or time.monotonic() >= deadline,
        )
        if path is not None or not int(self.committed.ledger["step"]):
            self._tell_saved(path)

    def _has_begun(self, version: Version) -> bool:
        """Whether the turn that begins with a version has. If not, a member that has committed it may be in the code after its step."""
        is_offered = self._turns.find(int(version.ledger.get("turn", 0))) is not None
        return is_offered or not self.crew.is_looping_elsewhere

    def save_at_end(self) -> None:
        """Save what this run has trained, on the first of its ranks; the others need not wait."""
        if self.state.current()[0] and self._is_whole and self.crew.is_first_living:
            self._tell_saved(self.saver.save())

    def save_at_once(self) -> None:
        """Save what is committed because the run is about to fail; nothing that goes wrong here may hide the cause."""
        if int(self.committed.ledger["step"]) and self._is_whole:
            # What fails the run may be that there is no memory, or no room for a thread.
            with contextlib.suppress(OSError, ArgosyError, MemoryError, RuntimeError):
                self._tell_saved(self.saver.save())

    def _tell_saved(self, path: Path | None) -> None:
        """Without a path: no step was made yet."""
        step = None if path is None else names.step_of(path.name)
        self.run.note_saved(step or 0, path)

    def _hear_save(self, event: Event) -> None:
        """What becomes of saves stands among the run's events, and what goes wrong is said at once; in whatever thread."""
        said = describe(event)
        if said is not None:
            tell = self.run.gang.warn if said[0] == "warning" else self.run.gang.inform
            tell(said[1])

    def _watch_save(self, advance: Advance) -> None:
        """Whoever is to leave is not killed while its save goes on."""
        self.run.gang.saving(advance.step, advance.num_bytes, advance.total_bytes, advance.what)

    @property
    def _is_whole(self) -> bool:
        """Without recovery what is being made is made in the same memory."""
        return self.settings.recovery or self.state.making() is None

    def _stored(self, version: Version) -> StoredVersion:
        # With the state that the turn under way began with: a resume begins that turn again.
        state = self._turns.find(int(version.ledger.get("turn", 0)))
        more = {} if state is None else {"state": state.decode()}
        return self._as_part(version, {**version.ledger, **more})

    def _as_part(self, version: Version, ledger: Mapping[str, Any] | None = None) -> StoredVersion:
        return StoredVersion(
            version,
            assembly.plain(self.model),
            self.updaters,
            self.facts(),
            ledger=ledger,
            allow_drift=self.settings.allow_drift or self.run.allows_drift,
        )

    def facts(self) -> dict[str, Any]:
        """What must be the same when the run is resumed."""
        return self._facts

    def batch(self, work: Work, lane: int) -> Any:
        """A lane's batch: made ahead, or at once, or by user code, which may take its time."""
        roster, rank = self.crew.roster, self.crew.rank
        roster.leave_step(rank)
        try:
            return self._make_batch(work, lane)
        finally:
            roster.enter_step(rank)

    def _make_batch(self, work: Work, lane: int) -> Any:
        if work.feeding is None:
            return self._counted.take(work.index, lane)
        place = work.version, work.step, work.index
        batch = self._pantry.batch(work.feeding, self.model, place, lane)
        batch.totals = None if work.totals is None else dict(work.totals)
        return batch

    def _prepare_batches(self, work: Work) -> None:
        """Where user code makes the batches and denominators are asked for: all lanes' batches are made before the first is computed with.

        Nobody has a slot yet: who waits here keeps nobody else from making his.
        """
        counts, feeding = self.settings.counts, work.feeding
        if counts is None or feeding is None or work.totals is not None:
            return
        place, lanes = (work.version, work.step, work.index), range(self.settings.lanes)
        for lane in self.transaction.lanes_of_this_rank():
            self.batch(work, lane)
        self.exchange.wake()

        def missing() -> list[int]:
            return [lane for lane in lanes if not self._pantry.has(place, lane)]

        def owners() -> list[int]:
            members, crew = self.transaction.members, self.crew
            found = owners_of_lanes(members, len(lanes), is_interim=crew.is_interim)
            return sorted({found[lane] for lane in missing()})

        self.transaction.patience.wait(
            lambda deadline: self.exchange.wait_for(
                lambda: not missing(),
                f"step {work.step}: the batches of lanes {missing()} are not made",
                deadline=deadline,
            ),
            owners,
        )
        batches = [self._pantry.batch(feeding, self.model, place, lane) for lane in lanes]
        work.totals = totals_of(counts, batches)

    def restore_state(self) -> None:
        """Give user code the state that was committed, or if no step was, the one that it began with."""
        state = self.committed.ledger.get("state")
        self.run.state.restore(self._first_state if state is None else state.encode())

    def _expect(self, index: int) -> None:
        """Let the batches of this step and of those that follow be made."""
        lanes = self.transaction.lanes_of_this_rank()
        if self._counted.needs_all_lanes:
            lanes = list(range(self.settings.lanes))
        ahead = range(index, index + self.settings.prefetch + 1)
        self.ahead.expect([(each, lane) for each in ahead for lane in lanes])

    def _restore(self, first: Version) -> bool:
        """Fill the first version from a checkpoint: of this run, whose memory is lost, or of the one it goes on with; False: it begins anew."""
        given, policy = self.run.resume_from, self.settings.checkpoints or Checkpoints()
        own = Path(self.run.directory)
        directories: list[tuple[Path, Checkpoints]] = []
        if given is None or Path(given) != own:
            directories.append((own, dataclasses.replace(policy, objects=None)))
        if given is not None:
            # Only then: a new run does not go on with what an object store happens to have.
            directories.append((Path(given), policy))
        loaded = saver.restore(self._as_part(first), own, directories)
        if loaded is None and given is not None:
            raise ConfigError(
                f"there is no checkpoint in {given}",
                fix="resume from the directory of a run that was stopped after its first step",
            )
        if loaded is not None:
            where = self.run.directory if given is None else given
            is_elsewhere = not Path(loaded.where).is_dir()
            more = f", from {loaded.where}" if is_elsewhere else ""
            sys.stderr.write(f"argosy: goes on from step {loaded.step} of {where}{more}\n")
        # What an earlier life of this run has written of later steps is made again.
        self.run.go_back(0 if loaded is None else loaded.step, is_alone=True)
        return loaded is not None

    def _tell_bounds(self) -> None:
        """Let the runtime know how many ranks this trainer can have, and that what it makes outlives them."""
        settings, gang = self.settings, self.run.gang
        least, most, why = 1, settings.lanes, f"it has {settings.lanes} lanes for all its life"
        if not settings.recovery:
            least = most = gang.world_size
            why = f"with recovery=False it has the {most} ranks that it began with"
        gang.bound(
            least=least,
            most=most,
            why=why,
            keeps_state=settings.recovery,
            hang_seconds=settings.first_hang_seconds if settings.recovery else 0.0,
        )

    def _warm_up(self) -> None:
        """A replacement computes one lane for nothing, so that its first real one is not slow."""
        if isinstance(self.feed, Unfed):
            return
        seeds.seed_all(self.run.seed)
        given = self.loss(self.model, self._counted.take(0, 0))
        total = next(iter(given.values())) if isinstance(given, Mapping) else given
        torch.autograd.backward(total[0])
        for parameter in self.model.parameters():
            parameter.grad = None

    def _look_at_one_lane(self) -> None:
        modes.begin_training(self.model)
        self.loss(self.model, self._counted.take(0, 0))


def _check_arguments(model: object, loss: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model= is {type(model).__name__}, not a torch.nn.Module", fix="give a module, made"
        )
    if not callable(loss):
        raise ConfigError(
            f"loss= is {type(loss).__name__}, not a function",
            fix="loss=fn, where fn(model, batch) returns (sum, count)",
        )


def _make_feed(data: Any, settings: Settings, seed: int) -> Any:
    if data is None:
        return Unfed(lanes=settings.lanes, seed=seed)
    return sources.as_source(data).feed(
        batch_size=settings.batch_size, lanes=settings.lanes, seed=seed
    )


def _check_ranks(world_size: int, lanes: int) -> None:
    if world_size > lanes:
        raise ConfigError(
            f"{world_size} ranks for {lanes} lanes",
            fix=f"use at most {lanes} ranks, or more lanes",
        )
