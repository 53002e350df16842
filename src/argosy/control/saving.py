"""Saving what a run has come to when it is stopped at a moment at which nobody is there who could.

What a trainer has made is in the run's memory and not in its processes. When a run is stopped and all of them end without a save (they
were just being replaced, say), one more is started, alone: it finds the state, saves it and leaves. Whether that is needed, for how
long it is waited for (the rules are a household's, too: protocol/savers.py), and what to say when nothing was saved. Called by the
supervisor; pure.
"""

from __future__ import annotations

from argosy.control.attempts import Attempt, Role, grace_of
from argosy.control.membership import members_of
from argosy.control.restarts import describe
from argosy.control.runstate import RunState
from argosy.protocol import advances, savers


def needs_saver(state: RunState, role: Role) -> bool:
    """Whether a process is to be started that saves the role's state; none of the role is alive."""
    if role.entered_at is None or role.bounds is None:
        return False  # nothing was trained: thousands of attempts need not be looked at
    own = [attempt for attempt in state.attempts.values() if attempt.role == role.name]
    legacy = savers.Legacy(
        has_entered=True,
        keeps_state=role.bounds.keeps_state,
        has_saved=role.has_saved,
        has_finished=has_finished(role),
        has_answered=any(_has_answered(state, attempt) for attempt in own),
    )
    return savers.needs_saver(legacy, [_was_unlucky(each) for each in own if each.saving])


def has_finished(role: Role) -> bool:
    """Whether the gang's work is done and saved, whenever that was."""
    # Those too that were told to stop meanwhile.
    ended_well = {a.id: a.exit is not None and a.exit.code == 0 for a in members_of(role)}
    saved_by = role.saved.attempt if role.saved is not None else ""
    return savers.has_finished(ended_well, len(role.members), saved_by)


def saver_seconds(role: Role) -> float:
    """How long one may take that tells nothing: a start three times as slow as the slowest before it, and the grace of one that is told to stop."""
    return savers.saver_seconds(grace_of(role.spec, has_joined=True), role.slowest_entry)


def late_at(role: Role, attempt: Attempt) -> float:
    """When a saver is given up: not as long as its save goes on."""
    at = attempt.planned_at + saver_seconds(role)
    if attempt.advance is None:
        return at
    return max(at, attempt.advanced_at + grace_of(role.spec, has_joined=True))


def describe_advance(attempt: Attempt) -> str:
    """How far its save is; empty: it has told nothing."""
    fact = attempt.advance
    if fact is None:
        return ""
    return advances.describe_advance(fact.step, fact.num_bytes, fact.total_bytes, fact.what)


def describe_loss(state: RunState) -> str:
    """What a stopped run has lost; empty: nothing that is known of."""
    for role in state.order:
        if role.has_saved or role.bounds is None or not role.has_trained:
            continue
        own = [attempt for attempt in state.attempts.values() if attempt.role == role.name]
        started = [attempt for attempt in own if attempt.saving and attempt.exit is not None]
        has_ended_well = any(a.exit is not None and a.exit.code == 0 for a in own)
        if has_ended_well and not started:
            continue  # it had finished
        why = ""
        if started and started[-1].exit is not None:
            late = started[-1].stop_reason if started[-1].stopping else describe(started[-1].exit)
            why = f" (a process was started to save it: {late})"
        # Nobody tells of the saves on the way: they may be there.
        return f"nothing was saved at its end{why}"
    return ""


def _has_answered(state: RunState, attempt: Attempt) -> bool:
    """It was asked to save, could not and has said why. Of a run that is given up only who was started to save was asked in time: others raise what its first one did."""
    exit = attempt.exit
    if state.stop is not None and state.stop.failed and not attempt.saving:
        return False
    return exit is not None and attempt.exit_seq >= state.stop_seq and savers.is_answer(exit.code)


def _was_unlucky(attempt: Attempt) -> bool:
    """It did not come to save for reasons that another one may not meet."""
    exit = attempt.exit
    if exit is None or attempt.stopping:
        return False
    return exit.lost or savers.was_unlucky(exit.code, exit.signal)
