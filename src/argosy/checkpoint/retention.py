"""Which checkpoints may go: the newest n stay, every n-th, the best by a metric, those that are pinned; old ones expire, and space is kept free.

Whatever the rules say, nothing goes before a newer one is durable and verified, and nothing that another checkpoint needs. Pure: facts in, removals
out; cleaning.py reads the facts and carries the removals out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from argosy.checkpoint.collection import mark
from argosy.errors import ConfigError


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """What stays. A checkpoint stays when any of `last`, `every` and `best` wants it; without any of the three all do.

    `expire_seconds` ends the stay of those that `every` or `best` want; `free_bytes` that of the oldest when the disk gets full. Neither ends
    that of the newest verified one, nor of pinned ones.
    """

    last: int | None = None
    """The newest n that are not known to be damaged, and what lies between them."""
    every: int | None = None
    """Steps that n divides."""
    best: str | None = None
    """A metric that was saved with the checkpoints; one that none of them has is no rule."""
    best_count: int = 1
    best_is_highest: bool = False
    expire_seconds: float | None = None
    free_bytes: int = 0


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is there."""

    step: int
    saved_at: float = 0.0
    num_bytes: int = 0
    """What removing it would free."""
    metrics: dict[str, float | None] = {}
    is_pinned: bool = False
    needs: tuple[int, ...] = ()
    """Steps in whose directories some of its files lie."""
    is_damaged: bool = False
    """Whether it is known not to be whole: then no rule counts it."""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """One that goes, and why."""

    step: int
    why: str


def check(keep: Keep) -> Keep:
    """The rules themselves, if they can be followed."""
    if not isinstance(keep, Keep):
        raise ConfigError(f"keep = {keep!r} is no Keep", fix="give Keep(last=3)")
    counts: dict[str, object] = {
        "last": keep.last,
        "every": keep.every,
        "best_count": keep.best_count,
    }
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} = {value!r} keeps nothing", fix="use a number from 1 up")
    if keep.best is not None and not isinstance(keep.best, str):
        raise ConfigError(
            f"best = {keep.best!r} is no metric's name", fix='give best="loss", best_count=3'
        )
    if keep.expire_seconds is not None and not keep.expire_seconds > 0:
        raise ConfigError(
            f"expire_seconds = {keep.expire_seconds} is no time", fix="use seconds above 0"
        )
    if keep.free_bytes < 0:
        raise ConfigError(f"free_bytes = {keep.free_bytes}", fix="use a number from 0 up")
    return keep


def wants_verified(
    known: Sequence[Known], keep: Keep, newest: int, *, now: float, free_bytes: int
) -> bool:
    """Whether anything would go if the newest were verified: only then it is worth reading it."""
    return bool(plan(known, keep, {newest}, now=now, free_bytes=free_bytes))


def plan(
    known: Sequence[Known],
    keep: Keep,
    verified: Collection[int],
    *,
    now: float,
    free_bytes: int,
) -> list[Removal]:
    """What goes, oldest first. `verified` are steps whose every byte has been read and found right."""
    steps = sorted(known, key=lambda one: one.step)
    proven = max((one.step for one in steps if one.step in verified), default=None)
    if proven is None:
        return []
    # What is newer than the newest that is whole is not.
    whole = [
        one for one in steps if one.step == proven or (one.step < proven and not one.is_damaged)
    ]
    held = {one.step for one in steps if one.is_pinned or one.step >= proven}
    needs = {one.step: one.needs for one in steps}
    wanted = _wanted(steps, whole, keep)
    going = {one.step: "no rule keeps it" for one in steps if one.step not in wanted}
    if keep.expire_seconds is not None:
        limit = now - keep.expire_seconds
        latest = _latest(whole, keep.last or 1)
        for one in steps:
            if one.saved_at < limit and one.step < latest:
                going[one.step] = "it has expired"
    live = mark({one.step for one in steps if one.step not in going} | held, needs)
    gone = [one for one in steps if one.step not in live]
    found = {one.step: going[one.step] for one in gone}
    short = keep.free_bytes - free_bytes - sum(one.num_bytes for one in gone)
    if short > 0:
        treasured = {one.step for one in best(whole, keep)}
        found |= _freed(steps, treasured, held, set(found), short)
    return [Removal(step=step, why=found[step]) for step in sorted(found)]


def is_unrated(known: Sequence[Known], keep: Keep) -> bool:
    """Whether the metric of `best` is that of no whole checkpoint: its name may be wrong."""
    rated = [one for one in known if keep.best in one.metrics and not one.is_damaged]
    return keep.best is not None and not rated


def _wanted(steps: Sequence[Known], whole: Sequence[Known], keep: Keep) -> set[int]:
    has_best = keep.best is not None and not is_unrated(whole, keep)
    if keep.last is None and keep.every is None and not has_best:
        return {one.step for one in steps}
    found: set[int] = set()
    if keep.last is not None:
        latest = _latest(whole, keep.last)
        found |= {one.step for one in steps if one.step >= latest}
    if keep.every is not None:
        found |= {one.step for one in steps if one.step % keep.every == 0}
    return found | {one.step for one in best(whole, keep)}


def _latest(whole: Sequence[Known], count: int) -> int:
    """The first of the newest so many."""
    return whole[-count:][0].step


def best(known: Sequence[Known], keep: Keep) -> list[Known]:
    """The best by the metric, best first; those without a number have no part in it. Of equals the newer is better."""
    if keep.best is None:
        return []
    name, sign = keep.best, -1 if keep.best_is_highest else 1
    rated = [
        (sign * value, -one.step, one)
        for one in known
        if (value := one.metrics.get(name)) is not None and math.isfinite(value)
    ]
    return [one for *_, one in sorted(rated, key=lambda row: row[:2])[: keep.best_count]]


def _freed(
    steps: Sequence[Known], treasured: set[int], held: set[int], gone: set[int], short: int
) -> dict[int, str]:
    """More that go because the disk is nearly full: the oldest first, the best last."""
    order = sorted(steps, key=lambda one: (one.step in treasured, one.step))
    needs = {one.step: one.needs for one in steps}
    found: dict[int, str] = {}
    for one in order:
        if short <= 0:
            break
        if one.step in held or one.step in gone:
            continue
        rest = {other.step for other in steps} - gone - set(found) - {one.step}
        if one.step in mark(rest, needs):
            continue
        found[one.step] = "the disk is nearly full"
        short -= one.num_bytes
    return found
