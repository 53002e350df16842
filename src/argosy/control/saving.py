"""Saving what a run has come to when it is stopped at a moment at which nobody is there who could.

What a trainer has made is in the run's memory and not in its processes. When a run is stopped and all of them end without a save (they
were just being replaced, say), one more is started, alone: it finds the state, saves it and leaves. Whether that is needed, for how
long it is waited for, and what to say when nothing was saved. Called by the supervisor; pure.
"""

from __future__ import annotations

from argosy.control.attempts import Attempt, Role, grace_of
from argosy.control.membership import members_of
from argosy.control.restarts import SIGKILL, describe
from argosy.control.runstate import RunState
from argosy.errors import LEFT_CODE

MOST_STARTS = 3


def needs_saver(state: RunState, role: Role) -> bool:
    """Whether a process is to be started that saves the role's state; none of the role is alive."""
    # One whose members have come to train may have made a step of which nobody could tell any more.
    if role.has_saved or role.entered_at is None:
        return False
    if role.bounds is None or not role.bounds.keeps_state or has_finished(role):
        return False
    own = [attempt for attempt in state.attempts.values() if attempt.role == role.name]
    if any(_has_ended_itself(state, attempt) for attempt in own):
        return False  # it tried and could not, and has said why; or its work was done
    savers = [attempt for attempt in own if attempt.saving]
    return len(savers) < MOST_STARTS and all(map(_was_unlucky, savers))


def has_finished(role: Role) -> bool:
    """Whether the gang's work is done and saved, whenever that was."""
    members = members_of(role)
    well = [attempt for attempt in members if attempt.end == "well"]
    if len(well) == len(role.members):
        return True
    # The first rank saves and the others do not wait for it: that one of them has ended well is not enough.
    by = role.saved.attempt if role.saved is not None else ""
    return bool(well) and any(attempt.id == by for attempt in members)


def saver_seconds(role: Role) -> float:
    """How long one may take: a start three times as slow as the slowest before it, and the grace of one that is told to stop."""
    return grace_of(role.spec, has_joined=True) + 3.0 * role.slowest_entry


def describe_loss(state: RunState) -> str:
    """What a stopped run has lost; empty: nothing that is known of."""
    for role in state.order:
        if role.has_saved or role.bounds is None or not role.has_trained:
            continue
        own = [attempt for attempt in state.attempts.values() if attempt.role == role.name]
        if any(attempt.exit is not None and attempt.exit.code == 0 for attempt in own):
            continue  # it had finished
        savers = [attempt for attempt in own if attempt.saving and attempt.exit is not None]
        why = ""
        if savers and savers[-1].exit is not None:
            late = savers[-1].stop_reason if savers[-1].stopping else describe(savers[-1].exit)
            why = f" (a process was started to save it: {late})"
        # Nobody tells of the saves on the way: they may be there.
        return f"nothing was saved at its end{why}"
    return ""


def _has_ended_itself(state: RunState, attempt: Attempt) -> bool:
    exit = attempt.exit
    if exit is None or exit.code is None or attempt.exit_seq < state.stop_seq:
        return False
    return exit.code != LEFT_CODE


def _was_unlucky(attempt: Attempt) -> bool:
    """It did not come to save for reasons that another one may not meet."""
    exit = attempt.exit
    if exit is None or attempt.stopping:
        return False
    return exit.lost or (exit.code is None and exit.signal in (None, SIGKILL))
