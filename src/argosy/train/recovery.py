"""Decisions of recovery: is a silent member hung, what follows from a failed lane, from a step that is not finite.

Called with plain numbers by patience.py and transaction.py, and by the simulator with simulated ones. Reads no clock. Pure.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ATTEMPT_BITS = 40
"""A round's step has above these bits how often the step was computed before: blocks of one computation are never taken for another's."""
_MEDIANS = 3.0
_BUSY_FACTOR, _BUSY_SECONDS = 20.0, 30.0
_IDLE_SECONDS = 0.2
_OUTSIDE_SECONDS = 60.0
"""A rank may be alone with an upload or a sample between two steps, or wait for the storage that a batch comes from; so long it is left in peace, unless it is stopped."""
_LAST_FACTOR = 10.0
"""One that waits for others is hardly at fault, one that computes between two steps may have much to do; only if nothing else ends it."""


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A member as it was seen: when, how much CPU it had used, the state of its process."""

    at: float
    ticks: int
    state: str
    is_waiting: bool = False
    """Whether it was seen to wait for others."""
    is_outside: bool = False
    """Whether it is in user code between two steps, or in that which makes a batch."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What is usual: the median step, and what is allowed beyond it."""

    median: float
    """Seconds; 0 when no step is done yet."""
    more: float
    first: float
    """Seconds allowed while no step is done."""


def accuse(waited: float, before: Sighting, now: Sighting, limits: Limits) -> str:
    """Why a member that others have waited for so long is taken for hung; empty: not yet.

    `before` is when it was last seen to have used CPU.
    """
    if not now.state:
        return ""  # it has ended: that is seen elsewhere, and at once
    patience = _MEDIANS * limits.median + limits.more if limits.median else limits.first
    if waited < patience:
        return ""
    if now.state in "Tt":
        return f"its process is stopped (state {now.state}) and was awaited for {waited:.1f} s"
    idle = now.at - before.at
    end = max(_BUSY_SECONDS, _BUSY_FACTOR * limits.median, limits.first / 4)
    if now.is_waiting:
        is_endless = waited >= _LAST_FACTOR * end
        return f"it waits without an end: awaited for {waited:.1f} s" if is_endless else ""
    if now.is_outside and idle < _OUTSIDE_SECONDS:
        is_endless = waited >= _LAST_FACTOR * max(end, _OUTSIDE_SECONDS)
        return f"it is in user code without an end: {waited:.1f} s" if is_endless else ""
    if now.state == "S" and now.ticks == before.ticks and idle >= max(_IDLE_SECONDS, patience / 2):
        return f"it has used no CPU for {idle:.1f} s while it was awaited"
    if waited >= end:
        return f"it computes without an end: awaited for {waited:.1f} s"
    return ""


def judge_failure(*, is_repeated: bool) -> Literal["leave", "fail"]:
    """A lane raised: leave, so that another rank computes it, or fail, since it raised there too."""
    return "fail" if is_repeated else "leave"
