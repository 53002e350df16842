"""Causes: which process failed first, and whose failures only followed from it.

Called by `argosy why` and at the end of a failed `argosy run`. Pure, over the events of one run. The order in which exits are
seen proves little (survivors of a collective die within milliseconds of the first), so failures that come close together
are ranked by what they are: signal or lack of memory, exception outside a collective, collective or connection error.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from argosy.analyze.attempts import (
    Attempt,
    Attempts,
    describe_exit,
    error_lines,
    name_all,
    read_attempts,
    restart_in,
)
from argosy.protocol.lastwords import TOGETHER_SECONDS
from argosy.protocol.peerloss import is_peer_loss

if TYPE_CHECKING:
    from argosy.analyze.attempts import EventObject

CRASHES = (4, 6, 7, 8, 11)
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV."""


class Incident:
    """One first cause with what it took with it, and what Argosy did about it."""

    __slots__ = ("cause", "failed_after", "is_mended", "remedy", "stopped")

    def __init__(self, cause: Attempt) -> None:
        self.cause = cause
        self.failed_after: list[Attempt] = []
        self.stopped: list[Attempt] = []
        self.remedy: list[str] = []
        self.is_mended = False
        """It was started again, or its gang re-formed."""

    @property
    def sentence(self) -> str:
        """`rank 2 on host was killed by SIGKILL (attempt 1, pid 1234)`."""
        cause = self.cause
        verb = describe_exit(cause.exit or {})
        if cause.declared:
            verb = "gave the run up"
        elif cause.suspicion and (cause.exit or {}).get("hung"):
            verb = f"killed as hung: {cause.suspicion}"
        was = "was " if verb.startswith(("killed", "lost")) else ""
        where = f" on {cause.host}" if cause.host else ""
        details = [f"{cause.role}/{cause.index}"] if cause.rank is not None else []
        details += [f"pid {cause.pid}"] if cause.pid else []
        details += [f"restart {cause.number}"] if cause.number else []
        details += [f"a fault was injected: {cause.fault}"] if cause.fault else []
        inside = f" ({', '.join(details)})" if details else ""
        return f"{cause.name}{where} {was}{verb}{inside}"

    @property
    def collateral(self) -> str:
        """Who ended only because of it, or nothing."""
        alike = [a for a in self.failed_after if _is_alike(a, self.cause)]
        others = [a for a in self.failed_after if a not in alike]
        alone = [a for a in others if rank_of_failure(a.exit or {}) == 0]
        after = [a for a in others if a not in alone]
        too_late = [a for a in self.stopped if _ended_by_itself(a)]
        stopped = [a for a in self.stopped if a not in too_late]
        parts = [f"{each.name} was {describe_exit(each.exit or {})} itself" for each in alone]
        if alike:
            parts.append(f"{name_all(alike)} ended in the same way")
        if after:
            verb = "failed" if len(after) > 1 else "failed too"
            parts.append(f"{name_all(after)} {verb} after losing it")
        if too_late:
            how = _ends_of(too_late)
            parts.append(f"{name_all(too_late)} failed before Argosy could stop the rest ({how})")
        if stopped:
            were = "were" if len(stopped) > 1 else "was"
            parts.append(f"{name_all(stopped)} {were} stopped by Argosy ({_ends_of(stopped)})")
        return "; ".join(parts)


def _ends_of(attempts: list[Attempt]) -> str:
    """How they ended in the words of `argosy ps`."""
    return ", ".join(dict.fromkeys(describe_exit(attempt.exit or {}) for attempt in attempts))


def _is_alike(attempt: Attempt, cause: Attempt) -> bool:
    """Nobody can say that one of two equal ends followed from the other."""
    if rank_of_failure(attempt.exit or {}) == 2:
        return False  # it says itself that it lost a peer
    return _has_same_end(attempt, cause)


def _ended_by_itself(attempt: Attempt) -> bool:
    """An error, or a code or signal that being told to stop does not make."""
    exit_fact = attempt.exit or {}
    by_stop = (None, attempt.stop_signal, int(signal.SIGTERM), int(signal.SIGKILL))
    return (
        bool(exit_fact.get("error"))
        or exit_fact.get("code") not in (None, 0, 130, 143)
        or exit_fact.get("signal") not in by_stop
    )


def rank_of_failure(exit_fact: dict[str, Any]) -> int:
    """0 is the likeliest first cause: signal, lack of memory, hang; 1: an exception; 2: a lost peer."""
    if exit_fact.get("is_oom") or exit_fact.get("hung") or exit_fact.get("lost"):
        return 0
    is_collateral = is_peer_loss(str(exit_fact.get("error", "")))
    if exit_fact.get("signal") is not None:
        # SIGABRT is how a runtime reports an error it could not raise, often a collective's.
        return 2 if exit_fact["signal"] == 6 and is_collateral else 0
    return 2 if is_collateral else 1


def find_incidents(events: list[EventObject]) -> list[Incident]:
    """Every failure of a run as incidents in order of time, each with its first cause and its collateral."""
    attempts = read_attempts(events)
    groups: list[list[Attempt]] = []
    failures = [attempt for attempt in attempts.by_id.values() if attempt.has_failed]
    for attempt in sorted(failures, key=lambda a: a.exited_at):
        if groups and _belong_together(groups[-1], attempt):
            groups[-1].append(attempt)
        else:
            groups.append([attempt])
    named = _named_first_cause(events)
    incidents = [_make_incident(group, named) for group in groups]
    for attempt in attempts.by_id.values():
        if attempt.exit is not None and attempt.was_told_to_stop and not attempt.has_failed:
            _blame(attempt, incidents)
    _note_remedies(events, incidents)
    for incident in incidents:
        incident.is_mended = _is_mended(incident.cause, attempts, events)
    return incidents


def final_incident(events: list[EventObject]) -> Incident | None:
    """The incident that ended the run; None when it did not fail."""
    ended = next((e["fact"] for e in reversed(events) if e["fact"]["kind"] == "run.ended"), None)
    if ended is None or ended.get("outcome") != "failed":
        return None
    incidents = find_incidents(events)
    named = ended.get("first_cause", "")
    for incident in incidents:
        if incident.cause.id == named:
            return incident
    return incidents[-1] if incidents else None


def first_of_kind(incidents: list[Incident], last: Incident) -> Incident:
    """Where it began: of the failures up to `last` that all ended with the same words, the first one."""
    found = last
    for incident in reversed(incidents[: incidents.index(last)]):
        if not _is_repeated(incident.cause, last.cause):
            break
        found = incident
    return found


def _is_repeated(one: Attempt, other: Attempt) -> bool:
    """The same exception, or the same crash; not two kills, which have nothing to do with each other."""
    is_crash = (other.exit or {}).get("signal") in CRASHES
    is_told = bool(error_lines(other.exit or {}))
    return one.role == other.role and (is_told or is_crash) and _has_same_end(one, other)


def _has_same_end(one: Attempt, other: Attempt) -> bool:
    first, second = (
        (describe_exit(end), error_lines(end)[-1:]) for end in (one.exit or {}, other.exit or {})
    )
    return first == second


def _belong_together(group: list[Attempt], other: Attempt) -> bool:
    first = group[0]
    if any((a.role, a.index) == (other.role, other.index) for a in group):
        return False  # it was started again in between: a failure of its own
    is_near = other.exited_at - first.exited_at <= TOGETHER_SECONDS
    if first.role == other.role and first.generation and other.generation:
        return first.generation == other.generation and (is_near or other.number == first.number)
    return is_near


def _named_first_cause(events: list[EventObject]) -> str:
    for event in reversed(events):
        if event["fact"]["kind"] == "run.ended":
            return str(event["fact"].get("first_cause", ""))
    return ""


def _make_incident(group: list[Attempt], named: str) -> Incident:
    cause = min(
        group,
        key=lambda a: (a.id != named, rank_of_failure(a.exit or {}), a.exited_at, a.index),
    )
    incident = Incident(cause)
    incident.failed_after = [attempt for attempt in group if attempt is not cause]
    return incident


def _blame(attempt: Attempt, incidents: list[Incident]) -> None:
    """A process that Argosy stopped belongs to the newest incident before its end, if that was its own gang's."""
    for incident in reversed(incidents):
        if incident.cause.exited_at <= attempt.exited_at:
            same_gang = incident.cause.role == attempt.role
            if not same_gang or incident.cause.generation == attempt.generation:
                incident.stopped.append(attempt)
            return


def _is_mended(cause: Attempt, attempts: Attempts, events: list[EventObject]) -> bool:
    for event in events:
        fact = event["fact"]
        if event["at"] < cause.exited_at:
            continue
        if fact["kind"] == "run.stop_requested":
            return False  # who is started from here on only saves
        if fact["kind"] == "gang.formed" and fact["role"] == cause.role:
            return True
        if fact["kind"] == "attempt.started":
            other = attempts.by_id.get(fact["attempt"])
            place = (other.role, other.index) if other else None
            if other and place == (cause.role, cause.index) and other.number > cause.number:
                return True
    return False


def _note_remedies(events: list[EventObject], incidents: list[Incident]) -> None:
    """What was decided after each incident and before the next: new generations, restarts, the end."""
    for position, incident in enumerate(incidents):
        until = incidents[position + 1].cause.exited_at if position + 1 < len(incidents) else None
        restarts: list[str] = []
        for event in events:
            if event["at"] < incident.cause.exited_at or (
                until is not None and event["at"] >= until
            ):
                continue
            fact = event["fact"]
            if fact["kind"] == "gang.formed" and not fact["reason"].startswith("resized"):
                which = restart_in(fact["reason"])
                incident.remedy.append(
                    f"generation {fact['generation']} of {fact['role']} formed with {len(fact['members'])} ranks"
                    + (f", {which}" if which else "")
                )
            elif fact["kind"] == "attempt.planned" and not fact.get("generation"):
                restarts.append(restart_in(fact.get("reason", "")))
            elif fact["kind"] == "run.ended":
                incident.remedy.append(f"the run ended: {fact.get('reason') or fact['outcome']}")
        if restarts:
            count = f"{len(restarts)} process{'es' if len(restarts) > 1 else ''} restarted"
            incident.remedy.insert(0, f"{count}, {restarts[-1]}" if restarts[-1] else count)
