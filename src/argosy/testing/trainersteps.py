"""The loop of a simulated trainer: turns, evaluations, and each step until it is committed, through whatever interrupts it.

The order of things is that of train/transaction.py, evaluation.py and parts.py; who computes what, what follows from a failure or from bad numbers, which batch a step has and what is committed with it is decided by the
modules that those use (shares, recovery, guards, ledgers, rounds, trees).
"""

from __future__ import annotations

import math
from typing import Any

from argosy.errors import RoundOver
from argosy.move import trees
from argosy.move.rounds import Round
from argosy.move.trees import Node
from argosy.testing.trainers import Moved, Program, Raised, SimulatedTrainer
from argosy.testing.trainingmemory import RING, Block, Record
from argosy.testing.trainingtruth import Page, Sample
from argosy.train import guards, ledgers, recovery, shares


class Work:
    """A step that this process is at."""

    def __init__(self, version: int, step: int, index: int, state: int) -> None:
        self.version, self.step, self.index, self.state = version, step, index, state
        self.finished: set[int] = set()
        """Memberships in which this process has done its share."""


class Task:
    """An evaluation, with the lane that this process is at."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self.lane: int | None = None
        self.place = (0, 0)
        self.sums: list[tuple[int, int]] = []


class LoopingTrainer(SimulatedTrainer):
    """A trainer with a user's loop around it."""

    user_state = 0
    """What user code keeps: how many results it has seen."""
    _turn: int | None = None
    _next_record = 0
    _advances = 0

    def program(self) -> Program[None]:
        """Start, join, and take step after step."""
        yield "work", self.plan.start_seconds * (0.5 + self.random.random())
        yield from self.pass_by("start", 0)  # one that hangs here never joins
        self.keeper.say(self.process, {"say": "join", "generation": self.tidings.generation})
        bounds = {"least": 1, "most": self.plan.num_lanes, "why": "lanes", "keeps_state": True}
        seconds = self.plan.first_hang_seconds
        self.keeper.say(self.process, {"say": "bounds", **bounds, "hang_seconds": seconds})
        yield from self.pass_by("joined", 0)
        self.heeds_stops = self.heeds_stops or self.memory.state.version > 0
        self._check_stop()
        if self.memory.state.version:
            yield "work", self.plan.lane_seconds  # it warms up
        self.keeper.say(self.process, {"say": "enter"})
        self.heeds_stops = True
        yield from self.settle_persistently()
        yield from self.persist(self._refresh)
        self.user_state = int(self.memory.committed.ledger["state"])
        while True:
            step, turn = yield from self._begin_turn()
            if step >= self.plan.num_steps:
                break
            yield from self._loop_body(step, turn)
        # What user code does when the loop is over is nobody's business.
        self.memory.sign("done", self.rank, self.pid, 1)
        yield "sleep", self.plan.last_seconds * self.random.random()

    def _loop_body(self, step: int, turn: int) -> Program[None]:
        memory = self.memory
        memory.sign("outside", self.rank, self.pid, 2 * turn + 1)
        yield from self.pass_by("outside", step)
        yield "work", 0.002
        if self.plan.evaluate_every and step % self.plan.evaluate_every == 0:
            yield from self._evaluate(step)
        memory.sign("outside", self.rank, self.pid, 2 * turn + 2)
        began = self.clock.now
        ledger = memory.committed.ledger
        version = ledgers.version_of_turn(memory.state.version, ledger, turn)
        index = guards.batch_of_step(step, ledger.get("omitted", []))
        work = Work(version, step, index, self.user_state)
        yield from self.persist(lambda: self._finish(work))
        self.suspicions.learn(self.clock.now - began)
        self.keeper.say(self.process, {"say": "step", "step": int(memory.committed.ledger["step"])})
        if memory.committed.outcome["verdict"] == "rewind":
            self.user_state = int(memory.committed.ledger["state"])
        self.user_state += 1

    # --- turns ----------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        ledger = self.memory.committed.ledger
        return int(ledger["step"]), int(ledger["turn"])

    def _begin_turn(self) -> Program[tuple[int, int]]:
        step, turn = self._place()
        if not ledgers.is_of_loop(self._turn, turn):
            step, turn = yield from self._join_turn()
        self._turn = turn
        self.memory.turns.setdefault(turn, self.user_state)
        self.truth.began_turn(self.name, turn, step, self.user_state)
        self.memory.tell()
        return step, turn

    def _join_turn(self) -> Program[tuple[int, int]]:
        memory = self.memory

        def find() -> tuple[int, int, int | None] | None:
            step, turn = self._place()
            state = memory.turns.get(turn)
            if memory.asked.get(self.rank) != (turn, self.pid):
                memory.asked[self.rank] = (turn, self.pid)
                memory.tell()
            asked = [memory.asked.get(rank) == (turn, self.pid_of(rank)) for rank in self.members]
            return (step, turn, state) if state is not None or turn == 0 or all(asked) else None

        self.where = "join a turn"
        step, turn, state = yield from self.persist(lambda: self.wait(find, list))
        self.user_state = int(memory.committed.ledger["state"]) if state is None else state
        return step, turn

    # --- a step ---------------------------------------------------------------------------------------------------

    def _finish(self, work: Work) -> Program[None]:
        memory = self.memory
        if memory.state.version <= work.version and self.num_moves not in work.finished:
            try:
                yield from self._run_part(work)
            except RoundOver:
                pass  # the others needed nothing more of this process
            work.finished.add(self.num_moves)
        yield from self.wait(
            lambda: memory.flip(work.version + 1, self.name),
            lambda: self._owners_of(memory.undone(work.version + 1)),
        )
        yield from self.pass_by("refresh", work.step)
        yield from self._refresh()

    def _refresh(self) -> Program[None]:
        """Derive this process's share of the weights, and wait for the others'."""
        memory, version = self.memory, self.memory.state.version
        for name in self._mine():
            if memory.weights[name] < version:
                self.truth.wrote(self.name, self.number, f"weights of {version}")
                memory.weights[name] = version
        memory.tell()

        def stale() -> list[str]:
            return [name for name, seen in memory.weights.items() if seen < version]

        yield from self.wait(lambda: not stale(), lambda: self._owners_of(stale()))
        if self.plan.guard.policy == "rewind" and memory.state.version == version:
            memory.keep_snapshot(self.plan.guard.snapshot_every)

    def _run_part(self, work: Work) -> Program[None]:
        memory = self.memory
        attempt = memory.attempt_of(work.version)
        round = Round(work.version, attempt << recovery.ATTEMPT_BITS | work.step)
        if memory.is_over(round):
            return
        yield from self._compute(work, round, attempt)
        samples = yield from self._wait_lanes(round, attempt)
        mine = self._mine()
        yield "work", 0.001
        yield from self.pass_by("vote", work.step)
        is_finite = all(sample.is_finite for sample in samples)
        memory.votes.setdefault(round, {}).update(dict.fromkeys(mine, is_finite))
        memory.tell()
        self.where = f"votes of {round}"
        yield from self.wait(
            lambda: not memory.unvoted(round) or self._refuse_if_over(round),
            lambda: self._owners_of(memory.unvoted(round)),
        )
        verdict = self._judge(work, all(memory.votes[round].values()), attempt)
        if verdict == "again":
            memory.compute_again(work.version, attempt + 1)
            raise Moved
        yield from self._write(work, mine, samples, verdict)

    def _refuse_if_over(self, round: Round) -> bool:
        if self.memory.is_over(round):
            raise RoundOver(str(round))
        return False

    def _compute(self, work: Work, round: Round, attempt: int) -> Program[None]:
        memory, lanes = self.memory, self.plan.num_lanes
        count = len(self.members)
        given = {"is_interim": self.is_interim, "attempt": attempt}
        for first, more in shares.runs_of(self.position, count, lanes, **given):  # type: ignore[arg-type]
            for node in trees.blocks_of(first, more, lanes):
                missing = set(memory.missing(round))
                if missing.isdisjoint(range(node.first, node.stop)):
                    continue
                self._refuse_if_over(round)
                block = yield from self._compute_block(work, node)
                yield from self.pass_by("publish", work.step)
                self.truth.wrote(self.name, self.number, f"{node} of {round}")
                memory.publish(round, block)
                memory.tell()
                self.look()

    def _compute_block(self, work: Work, node: Node) -> Program[Block]:
        seen = set(self.memory.weights.values())
        is_bad = yield from self.pass_by("lane", work.step)
        for lane in range(node.first, node.stop):
            self.where = f"lane {lane} of step {work.step}"
            yield "work", self.plan.lane_seconds * (0.5 + self.random.random())
            if self.plan.poison == (work.step, lane):
                self.fail_at(work.step, lane, "this lane raises")
        seen |= set(self.memory.weights.values())
        is_finite = not is_bad and work.index not in self.plan.bad_batches
        lanes = range(node.first, node.stop)
        return Block(node, tuple(Sample(n, work.index, frozenset(seen), is_finite) for n in lanes))

    def fail_at(self, step: int, lane: int, text: str) -> None:
        """A lane raised: it ends this process; if it does so elsewhere too, no restart will help."""
        is_repeated = self.memory.note_failure(step, lane, text, self.name)
        self.truth.tell(
            f"{self.name}: step {step}, lane {lane} raises {text}, again: {is_repeated}"
        )
        if recovery.judge_failure(is_repeated=is_repeated) == "fail":
            self.truth.failed.add((step, lane))
            reason = f"step {step}, lane {lane} raised on two ranks: {text}"
            self.keeper.say(self.process, {"say": "fail", "reason": reason})
        raise Raised

    def _wait_lanes(self, round: Round, attempt: int) -> Program[tuple[Sample, ...]]:
        memory = self.memory
        owners = shares.owners_of_lanes(
            self.members, self.plan.num_lanes, is_interim=self.is_interim, attempt=attempt
        )

        def gathered() -> tuple[Sample, ...] | None:
            if memory.attempt_of(round.version) > attempt:
                raise Moved  # the step is computed again
            found = memory.gather(round)
            if found is None:
                self._refuse_if_over(round)
            return found

        self.where = f"lanes of {round}"
        return (
            yield from self.wait(
                gathered, lambda: sorted({owners[lane] for lane in memory.missing(round)})
            )
        )

    def _judge(self, work: Work, is_finite: bool, attempt: int) -> str:
        watch = guards.Watch(self.plan.guard)
        ledger = self.memory.committed.ledger
        skips = ledgers.skips_within(ledger, work.step, self.plan.guard.window)
        loss = 1.0 if is_finite else math.nan
        return watch.judge(loss, loss, attempt=attempt, skips=skips)

    def _write(
        self, work: Work, mine: list[str], samples: tuple[Sample, ...], verdict: str
    ) -> Program[None]:
        """Make this process's pages of the next version."""
        memory, version = self.memory, work.version + 1
        held = memory.snapshot[1] if memory.snapshot is not None else None
        snapshot = None
        if verdict == "rewind":
            snapshot = memory.agreed.setdefault((work.version, "verdict"), held)
            verdict = "skip" if snapshot is None else "rewind"
        yield from self.pass_by("update", work.step)
        names = [name for name in mine if name in memory.undone(version)]
        if not names or memory.state.version >= version:
            return
        old = memory.committed
        source = old if snapshot is None else memory.versions[snapshot]
        self.where = f"a slot for version {version}"
        begun = yield from self.wait(lambda: self._slot_of(version), list)
        new = memory.versions[begun[0]]
        yield "work", 0.001
        outcome = {"verdict": verdict, "loss": 1.0, "step": work.step, "index": work.index}
        for name in names:
            self.truth.wrote(self.name, self.number, f"{name} of version {version}")
            page = source.pages[name]
            if verdict == "go":
                page = Page(None, (*page.history, work.index), samples)
            if name == next(iter(self.plan.costs)) and memory.state.version < version:
                new.outcome = outcome
                new.ledger = self._next_ledger(work, old.ledger, source.ledger, outcome)
            yield from self.pass_by("flip", work.step)
            memory.write(version, begun[0], name, page)
        memory.tell()

    def _slot_of(self, version: int) -> tuple[int] | None:
        slot = self.memory.begin(version)
        return None if slot is None else (slot,)

    def _next_ledger(
        self, work: Work, old: dict[str, Any], source: dict[str, Any], outcome: dict[str, Any]
    ) -> dict[str, Any]:
        if outcome["verdict"] == "rewind":
            return ledgers.after_rewind(old, source, work.step, work.index)
        more = {"state": work.state}
        return ledgers.after_step(old, work.step, more, outcome, self.plan.guard)

    def _mine(self) -> list[str]:
        return shares.parameters_of(self.position, len(self.members), self.plan.costs)

    def _owners_of(self, names: list[str]) -> list[int]:
        count, wanted = len(self.members), set(names)
        return [
            rank
            for position, rank in enumerate(self.members)
            if not wanted.isdisjoint(shares.parameters_of(position, count, self.plan.costs))
        ]

    # --- evaluations ----------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> Program[None]:
        task = Task((self.memory.state.version, step))
        yield from self.persist(lambda: self._work_on(task, step))
        total = self.memory.totals[task.key]
        self.truth.evaluated(self.name, task.key, total, self.plan.evaluation_batches)

    def _work_on(self, task: Task, step: int) -> Program[None]:
        memory = self.memory
        while task.key not in memory.totals:
            entries = memory.entries(task.key)
            done = {each.lane: each.sums for each in entries if each.sums is not None}
            if len(done) == self.plan.num_lanes:
                memory.totals.setdefault(task.key, dict(sorted(done.items())))
                break
            living = {self.pid_of(rank) for rank in self.members} | {self.pid}
            taken = {e.lane for e in entries if e.sums is not None or e.pid in living}
            count, lanes = len(self.members), self.plan.num_lanes
            lane = task.lane
            if lane is None:
                lane = shares.lane_to_take(self.position, count, lanes, taken)
            if lane is None:
                yield from self._wait_evaluation(task, entries)
            else:
                yield from self._evaluate_lane(task, lane, step)
        memory.tell()

    def _evaluate_lane(self, task: Task, lane: int, step: int) -> Program[None]:
        memory = self.memory
        if task.lane is None:
            task.lane, task.sums = lane, []
            self._take_record(task, lane)
        elif task.place[0] != self.rank:
            self._take_record(task, lane)  # the records of the rank that it had are another's now
        while len(task.sums) < self.plan.evaluation_batches:
            self.look()
            yield from self.pass_by("evaluation", step)
            self.where = f"evaluation of lane {lane}"
            yield "work", self.plan.lane_seconds * (0.5 + self.random.random())
            task.sums.append((lane, len(task.sums)))
            memory.records[task.place].progress = len(task.sums)
            self._advances += 1
            memory.sign("advances", self.rank, self.pid, self._advances)
        record = memory.records[task.place]
        record.key, record.sums = task.key, task.sums
        task.lane = None
        memory.tell()

    def _take_record(self, task: Task, lane: int) -> None:
        task.place = (self.rank, self._next_record % RING)
        self._next_record += 1
        self.memory.records[task.place] = Record(task.key, lane, self.pid)

    def _wait_evaluation(self, task: Task, entries: list[Record]) -> Program[None]:
        memory = self.memory
        before = _news(entries)

        def is_new() -> bool:
            return task.key in memory.totals or _news(memory.entries(task.key)) != before

        def busy() -> list[int]:
            pids = {each.pid for each in memory.entries(task.key) if each.sums is None}
            return [rank for rank in self.members if self.pid_of(rank) in pids]

        self.where = "an evaluation"
        yield from self.wait(is_new, busy)


def _news(entries: list[Record]) -> tuple[int, int]:
    return sum(each.sums is not None for each in entries), sum(each.progress for each in entries)
