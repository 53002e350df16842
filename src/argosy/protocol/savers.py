"""Savers: processes that are started alone, to save what others have left in the memory of a run that is ending.

One rule for a cluster (control/saving.py) and a household (worker/savings.py): when one is needed, how long it may take, and after which end of
one another is tried. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from argosy.errors import LEFT_CODE

MOST_STARTS = 3
_SIGKILL = 9
_SLOWER = 3.0
"""A start may take so many times as long as the slowest one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Legacy:
    """What is known of the state of a gang that is ending."""

    has_entered: bool
    """A member has come to train: it may have made a step of which it could not tell any more."""
    keeps_state: bool
    """What was trained is in the run's memory and not in its processes."""
    has_saved: bool
    """Since the run is ending."""
    has_finished: bool
    """Its work is done and saved, whenever that was."""
    has_answered: bool
    """A member that was asked to save has ended by itself: it could not and has said why."""


def needs_saver(legacy: Legacy, were_unlucky: Sequence[bool]) -> bool:
    """Whether one is to be started when nobody is left; `were_unlucky`: of each that was started before, see `was_unlucky`."""
    if not (legacy.has_entered and legacy.keeps_state):
        return False
    if legacy.has_saved or legacy.has_finished or legacy.has_answered:
        return False
    return len(were_unlucky) < MOST_STARTS and all(were_unlucky)


def has_finished(ended_well: Mapping[str, bool], num_members: int, saved_by: str) -> bool:
    """Whether a gang's work is done and saved; `ended_well`: of each member of its newest generation, by attempt."""
    num_well = sum(ended_well.values())
    # The first rank saves and the others do not wait for it: that one of them has ended well is not enough.
    return num_well == num_members or (num_well > 0 and saved_by in ended_well)


def is_answer(code: int | None) -> bool:
    """Whether a process that was asked to save and leave, and has ended so, could not.

    One that has ended well may have left its last save to another: see `has_finished`.
    """
    return code not in (None, 0, LEFT_CODE)


def was_unlucky(code: int | None, signal: int | None) -> bool:
    """Whether a saver ended for reasons that another one may not meet: it was killed from outside, or not even started."""
    return code is None and signal in (None, _SIGKILL)


def saver_seconds(grace_seconds: float, slowest_entry: float) -> float:
    """How long one may take: to come as far as the slowest member did before it, and what one has that is told to stop."""
    return grace_seconds + _SLOWER * slowest_entry
