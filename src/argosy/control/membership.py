"""Membership of a gang: who is in the next generation, when it may be formed, and who must leave first.

A generation is formed only when every process that left the one before has been reaped; members whose program joined
stay alive and re-form in place, all others are ended and started again together. Called by the supervisor; pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from argosy.control.attempts import Attempt, Role, seats_of
from argosy.control.restarts import (
    Life,
    Tally,
    describe,
    describe_restart,
    wait_seconds,
    why_given_up,
    why_hopeless,
)
from argosy.protocol.facts import FailureClass, GenerationFormed
from argosy.protocol.lastwords import TOGETHER_SECONDS

__all__ = [
    "Decision",
    "decide",
    "fold_generation",
    "free_indices",
    "is_ending",
    "members_of",
    "why_impossible",
]


@dataclass(slots=True)
class Decision:
    """What a gang needs next; at most one of stop and kill, give_up, members, or start and park."""

    stop: list[Attempt] = field(default_factory=list)
    kill: list[Attempt] = field(default_factory=list)
    """Members that the gang is to go on without: nothing of theirs is needed any more."""
    give_up: str = ""
    cause: str = ""
    members: list[int] | None = None
    not_before: float = 0.0
    reason: str = ""
    start: list[tuple[int, int]] = field(default_factory=list)
    """(rank, index) of members of the formed generation that have no attempt in it yet."""
    park: list[int] = field(default_factory=list)
    """Indices that should hold a parked spare."""


def decide(role: Role, run: str) -> Decision:
    """The gang's next step as it stands."""
    if role.generation == 0:
        members = [p.index for p in role.processes[: role.spec.count] if not p.retired]
        return Decision(members=members, reason="start") if members else Decision()
    unfilled = _unfilled(role)
    if unfilled:
        return Decision(start=unfilled)
    broken = [a for a in members_of(role) if not a.is_alive and a.end != "well"]
    if not broken and role.policy == "permanent" and _has_ended(role):
        return _begin_again(role, run)
    if not broken and not _has_vacancy(role) and not _should_resize(role):
        return Decision(park=_missing_spares(role))
    return _heal(role, broken, run)


def members_of(role: Role) -> list[Attempt]:
    """The members' attempts in the present generation."""
    attempts = (role.processes[index].current for index in role.members)
    return [
        a for a in attempts if a is not None and a.generation == role.generation and not a.parked
    ]


def _has_ended(role: Role) -> bool:
    return all(attempt.end == "well" for attempt in members_of(role))


def _begin_again(role: Role, run: str) -> Decision:
    """A permanent gang ended well: it is started again, later and later if it ends too soon."""
    members = _resized(role, [i for i in role.members if not role.processes[i].retired])
    if not members:
        return Decision()
    backoff = role.spec.backoff
    last = max(members_of(role), key=lambda attempt: attempt.exited_at)
    row = 1 if last.life(backoff.most_seconds).is_long else min(role.generation, 8)
    wait = wait_seconds(backoff, row, run, role.name, role.generation)
    return Decision(
        members=members, not_before=last.exited_at + wait, reason="ended well; permanent"
    )


def _should_resize(role: Role) -> bool:
    """Another size was asked for, and the gang is not about to end well."""
    return role.is_resizing and not is_ending(role)


def is_ending(role: Role) -> bool:
    """A member has finished its work: the others are about to."""
    return any(attempt.end == "well" for attempt in members_of(role))


def _resized(role: Role, members: list[int]) -> list[int]:
    """The members with those cut off that have the highest ranks, or with more of them, as was asked for."""
    if not role.is_resizing:
        return members
    return members[: role.size] + free_indices(role)[: max(0, role.size - len(members))]


def free_indices(role: Role) -> list[int]:
    """Processes that a gang that grows may start: those it went on without, and those that were added."""
    own = role.spec.count + role.spec.spares
    return [
        process.index
        for process in role.processes
        if process.index not in role.members
        and not process.retired
        and process.alive is None
        and (process.index >= own or process.index in role.dropped)
    ]


def _has_vacancy(role: Role) -> bool:
    """A member was stopped by a person before it had a part in this generation."""
    for index in role.members:
        process = role.processes[index]
        attempt = process.current
        if process.retired and process.alive is None:
            return attempt is None or attempt.generation != role.generation
    return False


def _unfilled(role: Role) -> list[tuple[int, int]]:
    missing: list[tuple[int, int]] = []
    for rank, index in enumerate(role.members):
        process = role.processes[index]
        attempt = process.current
        if process.retired:
            continue
        if attempt is None or attempt.parked or attempt.generation != role.generation:
            if attempt is not None and attempt.is_alive and attempt.stopping:
                continue  # a spare that is being ended: its exit is awaited first
            missing.append((rank, index))
    return missing


def _missing_spares(role: Role) -> list[int]:
    if role.spec.spares == 0 or role.is_finished():
        return []
    outside = [p for p in role.processes if p.index not in role.members and not p.retired]
    # A slot that was given up (fewer members than count) is no spare: there are at most `spares`.
    parked = [p for p in outside if p.alive is not None]
    free = [
        p
        for p in outside
        if p.alive is None and not _is_spent(role, p.current) and not _was_dropped(role, p.index)
    ]
    return [p.index for p in free[: max(0, role.spec.spares - len(parked))]]


def _is_spent(role: Role, attempt: Attempt | None) -> bool:
    """A spare that keeps dying while parked is not parked again; the gang goes on without it."""
    if attempt is None or not attempt.parked or attempt.failure is None:
        return False
    history = role.processes[attempt.index].history
    tally = Tally(len(history.failures.get(attempt.failure, ())), history.row, history.fruitless)
    return bool(why_given_up(role.spec, attempt.failure, tally, False))


def _was_dropped(role: Role, index: int) -> bool:
    return index in role.dropped


def _heal(role: Role, broken: list[Attempt], run: str) -> Decision:
    remaining = [i for i in role.members if not role.processes[i].retired]
    staying = _resized(role, remaining)
    removed = set(remaining) - set(staying)
    failed = [a for a in broken if a.end == "failed" and a.index not in removed]
    cause = _cause(role, failed)
    why = _why(cause)
    leaving = _leaving(role, removed)
    if leaving:
        who = f"{role.name}/{cause.index} " if cause is not None else ""
        size = f"resized to {len(staying)}" if role.is_resizing and cause is None else ""
        return Decision(
            kill=[a for a in leaving if a.index in removed],
            # A suspect is killed as soon as the evidence is kept.
            stop=[
                a for a in leaving if a.index not in removed and not a.stopping and not a.is_suspect
            ],
            reason=size or f"the gang re-forms: {who}{why}",
        )
    if role.is_closed:
        return Decision()  # too few are left by a person's command: the role is over
    if cause is None or cause.failure is None or cause.exit is None:
        size = f"resized from {len(role.members)} to {len(staying)}" if role.is_resizing else ""
        return Decision(members=staying, reason=size or "started again with the rest")
    hopeless = _why_hopeless(role, cause)
    if hopeless:
        return Decision(give_up=f"{role.name}/{cause.index} {why}; {hopeless}", cause=cause.id)
    tally = _tally(role, cause, cause.failure)
    given_up = why_given_up(role.spec, cause.failure, tally, role.is_observable)
    if given_up:
        smaller = _resized(role, [i for i in remaining if i != cause.index])
        if len(smaller) < max(1, role.least):
            return Decision(give_up=f"{role.name}/{cause.index} {why}; {given_up}", cause=cause.id)
        reason = f"goes on with {len(smaller)} of {len(remaining)}: {given_up}"
        return Decision(members=smaller, reason=reason)
    row = role.history.row_of_kills(cause.exited_at, cause.failure)
    if cause.failure in ("user", "hang") or cause.exit.is_oom:
        row = tally.row
    last = max(a.exited_at for a in broken)
    key = (run, role.name, role.generation)
    which = describe_restart(role.spec, cause.failure, tally.in_period)
    return Decision(
        members=_with_spares(role, staying, failed),
        not_before=last + wait_seconds(role.spec.backoff, row, *key),
        reason=f"{role.name}/{cause.index} {why}; {which}",
    )


def _leaving(role: Role, removed: set[int]) -> list[Attempt]:
    """Members that are alive and have no place in the next generation as they are."""
    is_closed = role.is_closed
    return [
        attempt
        for attempt in members_of(role)
        if attempt.is_alive
        and (is_closed or attempt.index in removed or not role.can_reform(attempt))
    ]


def _cause(role: Role, failed: list[Attempt]) -> Attempt | None:
    """Of a failure of its own rather than of what is left of the last one."""
    fresh = [a for a in failed if not _is_aftermath(role, a) and not _has_lost_a_peer(a)]
    return min(
        (a for a in fresh or failed if a.exit is not None), key=lambda a: a.gravity, default=None
    )


def _is_aftermath(role: Role, attempt: Attempt) -> bool:
    """It was there at the failure that was counted last, and has no other: survivors form a generation before they end, too."""
    if attempt.failure != "user" or attempt.exit is None or role.has_progressed:
        return False
    said = _said(role, attempt)
    if said and said == role.history.said:
        return attempt.since <= role.said_generation  # else it is said again
    is_near = attempt.exited_at - role.failed_at <= TOGETHER_SECONDS
    return attempt.since <= role.failed_generation and (is_near or _has_lost_a_peer(attempt))


def _said(role: Role, attempt: Attempt) -> str:
    """The last words of its exception."""
    exit = attempt.exit
    if exit is None:
        return ""
    was_started = exit.code is not None or exit.signal is not None
    # What has run before and cannot be started now is a matter of the host, and may pass.
    return attempt.words if was_started or not role.has_trained else ""


def _has_lost_a_peer(attempt: Attempt) -> bool:
    return attempt.failure == "user" and attempt.has_lost_a_peer


def _why_hopeless(role: Role, cause: Attempt) -> str:
    """Why no further start can help a program that has never done anything; a permanent one is tried all the same."""
    if cause.failure != "user" or cause.exit is None or role.has_trained:
        return ""
    if role.policy == "permanent":
        return ""
    life = cause.life(role.spec.backoff.most_seconds)
    is_ready = any(attempt.said_ready for attempt in members_of(role))
    return why_hopeless(cause.exit, replace(life, has_progressed=life.has_progressed or is_ready))


def _why(cause: Attempt | None) -> str:
    return describe(cause.exit) if cause is not None and cause.exit is not None else "asked for"


def _tally(role: Role, cause: Attempt, failure: FailureClass) -> Tally:
    if _is_aftermath(role, cause):
        return role.history.standing(role.spec.budget, cause.exited_at, failure)
    return role.history.peek(role.spec.budget, cause.exited_at, failure, _life(role, cause))


def _life(role: Role, cause: Attempt) -> Life:
    """The gang's life since the last failure: it progressed if anybody did."""
    life = cause.life(role.spec.backoff.most_seconds)
    return Life(
        has_progressed=_has_progressed(role),
        # A program that tells of its progress has made none by living.
        is_long=life.is_long and not role.is_observable,
        is_oom=life.is_oom,
        said=_said(role, cause),
    )


def _has_progressed(role: Role) -> bool:
    members = members_of(role)
    if role.has_progressed or any(a.since > role.failed_generation for a in members):
        return role.has_progressed
    # All of them were there at the last failure, and told of their first steps before it.
    return any(a.said_ready or a.step is not None for a in members)


def _with_spares(role: Role, remaining: list[int], failed: list[Attempt]) -> list[int]:
    """Replace failed members, the gravest first, by spares that are parked on the same host."""
    spares = [
        p.current
        for p in role.processes
        if p.current is not None
        and p.index not in role.members
        and p.current.is_alive
        and p.current.parked
        and p.current.started_at is not None
        and not p.current.stopping
    ]
    chosen: dict[int, int] = {}
    for attempt in sorted(failed, key=lambda a: (a.gravity[0] if a.exit else 9, a.index)):
        spare = next((s for s in spares if s.host == attempt.host), None)
        if spare is not None and attempt.index in remaining:
            spares.remove(spare)
            chosen[attempt.index] = spare.index
    return [chosen.get(index, index) for index in remaining]


def why_impossible(role: Role, fact: GenerationFormed) -> str:
    """Why this generation may not be formed; empty: it may."""
    if fact.generation != role.generation + 1:
        return f"generation {fact.generation} of {role.name} follows {role.generation}"
    if len(set(fact.members)) != len(fact.members) or not fact.members:
        return f"members {fact.members} of {role.name} are not distinct"
    staying = set(fact.members)
    for attempt in role.alive():
        is_survivor = role.can_reform(attempt) and attempt.index in staying
        if not attempt.parked and not is_survivor:
            return f"generation {fact.generation} of {role.name} before {attempt.id} was reaped"
    return ""


def fold_generation(role: Role, fact: GenerationFormed, at: float) -> None:
    """Count the failure that ended the last generation, and give survivors their new ranks."""
    if role.generation:
        cause = _cause(role, [a for a in members_of(role) if a.end == "failed"])
        if cause is not None and cause.failure is not None and not _is_aftermath(role, cause):
            life = _life(role, cause)
            role.history.add(role.spec.budget, cause.exited_at, cause.failure, life)
            role.failed_generation, role.failed_at = role.generation, cause.exited_at
            if cause.failure == "user":
                role.said_generation = role.generation
            role.has_progressed = False
        # Smaller than before: what left does not come back as a spare either.
        if len(fact.members) < len(role.members):
            role.dropped |= set(role.members) - set(fact.members)
    role.dropped -= set(fact.members)
    role.size, role.is_resizing = len(fact.members), False
    role.generation, role.members, role.formed_at = fact.generation, list(fact.members), at
    role.seats = seats_of([role.processes[index].host for index in fact.members])
    for rank, index in enumerate(fact.members):
        attempt = role.processes[index].alive
        if attempt is not None and not attempt.parked:
            attempt.generation, attempt.rank, attempt.reform = fact.generation, rank, True
