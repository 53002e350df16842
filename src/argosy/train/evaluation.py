"""`trainer.evaluate()`: lanes of an evaluation set computed by all ranks that are in the call, without an update.

Each rank takes lanes that nobody has, one after the other, and adds up its batches in order; what a dead rank had begun is taken by another. A rank that joins the run meanwhile is not in this call,
so nothing waits for it. Sums are added by lane, so every world size comes to the same bits. The weights cannot change under it: a commit needs this rank's lanes.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from argosy import data as sources
from argosy.errors import ConfigError
from argosy.train import modes
from argosy.train.lanes import Loss
from argosy.train.seeds import mix, seed_all
from argosy.train.shares import lane_to_take
from argosy.train.tallies import Entry, Tally

if TYPE_CHECKING:
    from argosy.train.parts import Parts

Sums = dict[str, list[float]]
"""(sum, count, weight) by name."""


class Task:
    """One evaluation in this process, with the lane that it is at: kept through changes of membership."""

    def __init__(self, key: int, step: int, feed: Any, fn: Loss, batches: int | None) -> None:
        """Without `batches` it is of all samples, also those that do not fill a last one."""
        self.key, self.step, self.feed, self.fn = key, step, feed, fn
        self.has_rest = batches is None and hasattr(feed, "rest")
        self.batches: int = feed.num_batches if batches is None else batches
        self.lane: int | None = None
        self.record = 0
        self.rank = 0
        """Whose records that one is among."""
        self.index = 0
        self.sums: Sums = {}
        self.result: Sums = {}


class Evaluation:
    """The evaluations of one trainer."""

    def __init__(self, parts: Parts, arena_name: str) -> None:
        settings = parts.settings
        self._parts = parts
        self._num_lanes = settings.lanes
        self._tally = Tally(arena_name, most_ranks=settings.most_ranks, num_lanes=self._num_lanes)
        self._feeds: dict[int, tuple[Any, Any]] = {}
        self._calls: Counter[int] = Counter()
        self._version = -1

    def run(self, data: Any, fn: Loss | None, batches: int | None, view: str) -> dict[str, float]:
        """Means over the set, by name; `view` says which weights the model shows."""
        parts = self._parts
        feed = self._feed_of(data)
        count = feed.num_batches if batches is None else batches
        if count is None or count < 1:
            raise ConfigError(
                f"evaluate() over {count} batches", fix="say how many: evaluate(data, batches=16)"
            )
        chosen = fn or parts.loss
        step = parts.transaction.shown[1]
        task = Task(self._key(feed, chosen, batches, view), step, feed, chosen, batches)
        parts.load_buffers()
        with modes.evaluating(parts.model):
            parts.transaction.persist(lambda: self._work(task))
        return _means(task.result)

    # --- the work -----------------------------------------------------------------------------

    def _work(self, task: Task) -> None:
        """Compute lanes until all are there. Interrupted by changes of membership, and called again."""
        rank = self._parts.crew.rank
        while True:
            total = self._tally.total(task.key)
            if total is not None:
                break
            entries = self._tally.entries(task.key)
            done = {each.lane: each.value for each in reversed(entries) if each.value is not None}
            if len(done) == self._num_lanes:
                total = self._tally.agree(task.key, rank, _add_up(done))
                break
            lane = self._choose(task, entries)
            if lane is None:
                self._wait(task, entries)
            else:
                self._compute(task, lane)
        task.result = total
        self._parts.exchange.wake()

    def _choose(self, task: Task, entries: list[Entry]) -> int | None:
        """A lane that is neither done nor in living hands; the one that this rank is at comes first."""
        if task.lane is not None:
            return task.lane
        crew = self._parts.crew
        living = {crew.pid_of(rank) for rank in crew.members} | {os.getpid()}
        taken = {each.lane for each in entries if each.value is not None or each.pid in living}
        return lane_to_take(crew.position, len(crew.members), self._num_lanes, taken)

    def _compute(self, task: Task, lane: int) -> None:
        parts = self._parts
        if task.lane is None:
            task.lane, task.index, task.sums = lane, 0, {}
            self._take(task)
        elif task.rank != parts.crew.rank:
            self._take(task)  # the records of the rank that it had are another process's now
        while task.index < task.batches:
            parts.crew.look()
            _add(task.sums, self._try(task, lane))
            task.index += 1
            self._tally.advance(task.record, task.index)
            parts.crew.roster.advance(parts.crew.rank)
        if task.has_rest:
            _add(task.sums, self._try(task, lane))
        self._tally.finish(task.record, task.key, task.sums)
        task.lane = None
        parts.exchange.wake()

    def _take(self, task: Task) -> None:
        assert task.lane is not None
        task.rank = self._parts.crew.rank
        task.record = self._tally.take(task.rank, task.key, task.lane, os.getpid())

    def _try(self, task: Task, lane: int) -> Sums:
        try:
            return self._call(task, lane)
        except Exception as error:
            self._parts.transaction.note_failure(task.step, lane, error)
            raise

    def _call(self, task: Task, lane: int) -> Sums:
        """The function on one batch, with the generators that belong to it; after the last one on what is left."""
        is_rest = task.index == task.batches
        batch = task.feed.rest(lane) if is_rest else task.feed.batch(task.index, lane)
        if batch is None:
            return {}
        seed_all(self._parts.run.seed, task.step, lane, task.index)
        with torch.no_grad():
            return _checked(task.fn(self._parts.model, batch))

    def _wait(self, task: Task, entries: list[Entry]) -> None:
        """Until anything is new: a lane that gets on is waited for, however long it takes."""
        parts = self._parts
        before = _news(entries)

        def wait(deadline: float) -> None:
            while self._tally.total(task.key) is None:
                if _news(self._tally.entries(task.key)) != before:
                    return
                parts.exchange.wait_progress(deadline=deadline)

        parts.transaction.patience.wait(wait, lambda: self._busy(task))

    def _busy(self, task: Task) -> list[int]:
        """The ranks that are at work on lanes."""
        entries = self._tally.entries(task.key)
        pids = {each.pid for each in entries if each.value is None}
        return [rank for rank in self._parts.crew.members if self._parts.crew.pid_of(rank) in pids]

    # --- what is evaluated --------------------------------------------------------------------

    def _feed_of(self, data: Any) -> Any:
        known = self._feeds.get(id(data))
        if known is None:
            source, lanes = sources.as_source(data), self._num_lanes
            size: int = self._parts.settings.batch_size
            count = getattr(source, "num_samples", 0)
            if lanes <= count < size:
                size = (
                    count // lanes * lanes
                )  # a small set is no reason for small batches in training
            feed = source.feed(batch_size=size, lanes=lanes, seed=self._parts.run.seed)
            known = self._feeds[id(data)] = (data, feed)
        return known[1]

    def _key(self, feed: Any, fn: Callable[..., Any], batches: int | None, view: str) -> int:
        """The same for the same evaluation of the same version on every rank, also on one that has just joined."""
        version = self._parts.transaction.shown[0]
        if version != self._version:
            self._version, self._calls = version, Counter()
        code = getattr(fn, "__code__", None)
        place = (code.co_filename, code.co_firstlineno) if code else type(fn).__qualname__
        text = repr((feed.fingerprint, place, getattr(fn, "__qualname__", ""), batches, view))
        name = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        self._calls[name] += 1
        return mix(version, name, self._calls[name]) | 1


def _checked(given: Any) -> Sums:
    """What a function returned, as numbers: (sum, count), or several by name, a loss's with a weight."""
    named = given if isinstance(given, Mapping) else {"loss": given}
    found: Sums = {}
    for name, value in named.items():
        if not isinstance(value, tuple | list) or len(value) not in (2, 3):
            raise ConfigError(
                f"evaluate() was given {type(value).__name__} for {name!r}, not (sum, count)",
                fix='return a sum and what it counts: {"accuracy": (correct, total)}',
            )
        numbers = [float(each) for each in value]
        if not math.isfinite(numbers[1]) or numbers[1] < 0:
            raise ConfigError(f"the count of {name!r} is {numbers[1]}", fix="return a number")
        found[str(name)] = [*numbers, 1.0][:3]
    return found


def _add(sums: Sums, more: Mapping[str, list[float]]) -> None:
    for name, (part, count, weight) in more.items():
        before = sums.get(name, [0.0, 0.0, weight])
        sums[name] = [before[0] + part, before[1] + count, weight]


def _add_up(done: Mapping[int, Sums]) -> Sums:
    """In the order of lanes."""
    sums: Sums = {}
    for lane in sorted(done):
        _add(sums, done[lane])
    return sums


def _means(sums: Sums) -> dict[str, float]:
    # There is no mean over nothing.
    means = {name: part / count if count else math.nan for name, (part, count, _) in sums.items()}
    if "loss" not in means and any(weight != 1.0 for *_, weight in sums.values()):
        counted = [(name, weight) for name, (_, count, weight) in sums.items() if count]
        means["loss"] = sum(means[name] * weight for name, weight in counted)
    return means


def _news(entries: list[Entry]) -> tuple[int, int]:
    return sum(each.value is not None for each in entries), sum(each.progress for each in entries)
