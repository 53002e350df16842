"""Story: events as sentences for people.

Called by `argosy events` (all of them) and by `argosy run` (the short ones that are worth a line). Pure: keeps who is who from
the events it has been told, and never asks anybody.
"""

from __future__ import annotations

from collections.abc import Callable

from argosy.analyze.attempts import (
    Attempt,
    Attempts,
    describe_exit,
    error_lines,
    is_success,
    restart_in,
)
from argosy.analyze.ranksets import format_ranks
from argosy.analyze.resuming import how_to_go_on
from argosy.protocol.advances import describe_fact

TYPE_CHECKING = False  # typing itself costs more than reading a command line
if TYPE_CHECKING:
    from typing import Any

    from argosy.analyze.attempts import EventObject


_MOST_ERROR = 120
"""Letters of an error in a sentence; `argosy why` has it whole."""


class Story:
    """Tells events one at a time, in order."""

    def __init__(self) -> None:
        self._attempts = Attempts()
        self._has_told_death = False
        self._told_notes: set[str] = set()
        self._told_save = ""
        self._facts: dict[str, dict[str, Any]] = {}
        """How the run was submitted, what size it was given later, and that it is to stop."""

    def tell(self, event: EventObject) -> str:
        """The whole sentence of an event."""
        fact = event["fact"]
        attempt = self._attempts.apply(event)
        who = attempt.name if attempt else fact.get("attempt", "")
        if attempt and attempt.rank is not None:
            who = f"{who} ({attempt.role}/{attempt.index})"
        sentence = _SENTENCES.get(fact["kind"])
        return sentence(fact, who) if sentence else _unknown(fact)

    def headline(self, event: EventObject) -> str:
        """The short line for a person who watches the run, or nothing when it is not worth one."""
        fact = event["fact"]
        attempt = self._attempts.apply(event)
        kind = fact["kind"]
        if kind == "gang.formed":
            has_told, self._has_told_death = self._has_told_death, False
            return _formed_headline(fact, with_reason=not has_told)
        if kind == "attempt.started":
            return self._started_headline(fact, attempt)
        if kind in ("run.submitted", "run.stop_requested", "gang.resized"):
            self._facts[kind] = fact
        if kind == "attempt.exited" and attempt:
            if (attempt.was_told_to_stop and not fact.get("hung")) or is_success(fact):
                return ""
            self._has_told_death = True
            return f"{attempt.name} {describe_exit(fact)}"
        if kind == "attempt.released" and attempt:
            return f"a spare takes the place of rank {fact.get('rank')}"
        if kind == "gang.resized":
            return f"{fact['role']} is to have {fact['size']} ranks"
        if kind == "run.saved":
            said, before = self._saved_headline(fact, attempt), self._told_save
            self._told_save = said
            # Each rank that has waited for a save tells of it.
            return said if said != before else ""
        if kind == "attempt.suspected" and attempt:
            return f"{attempt.name} seems to hang: {fact['reason']}"
        if kind == "fault.injected":
            return fault_sentence(fact)
        if kind == "run.ports_refused":
            return f"a port could not be had: {fact['reason']}"
        if kind == "note" and fact.get("level", "info") != "info":
            return str(fact["text"])
        return ""

    def _started_headline(self, fact: dict[str, Any], attempt: Attempt | None) -> str:
        if fact.get("note") in self._told_notes:
            return ""
        if fact.get("note"):
            # Once for each reason: the other ranks, and those of the next generation, have the same.
            self._told_notes.add(fact["note"])
            who = attempt.name if attempt else "a process"
            return f"{who} started without a warm parent: {fact['note']}"
        if attempt and attempt.rank is None and attempt.number and not attempt.is_parked:
            return f"{attempt.name} started again ({_which(attempt)}, pid {attempt.pid})"
        return ""

    def _saved_headline(self, fact: dict[str, Any], attempt: Attempt | None) -> str:
        if not fact.get("path"):
            return ""
        said = f"step {fact['step']} is saved in {fact['path']}"
        submitted = self._facts.get("run.submitted")
        if submitted is None or attempt is None or "run.stop_requested" not in self._facts:
            return said
        # A checkpoint lies two levels below the run's directory.
        directory = fact["path"].rsplit("/", 2)[0]
        size = self._facts.get("gang.resized", {}).get("size")
        return f"{said}; go on: {how_to_go_on(submitted, attempt.role, directory, size=size)}"


def _which(attempt: Attempt) -> str:
    return restart_in(attempt.reason) or f"restart {attempt.number}"


def _formed_headline(fact: dict[str, Any], *, with_reason: bool) -> str:
    count = len(fact["members"])
    ranks = f"{count} rank{'s' if count != 1 else ''}"
    if fact["generation"] <= 1:
        return f"starting {ranks}, generation {fact['generation']}"
    told = fact.get("reason", "") if with_reason else restart_in(fact.get("reason", ""))
    return f"generation {fact['generation']}: {ranks}" + (f" ({told})" if told else "")


def _unknown(fact: dict[str, Any]) -> str:
    details = ", ".join(f"{key}={value}" for key, value in fact.items() if key != "kind")
    return f"{fact['kind']}: {details}"


def _submitted(fact: dict[str, Any], who: str) -> str:
    name = f" {fact['name']!r}" if fact.get("name") else ""
    roles = ", ".join(
        f"{role} x{spec.get('count', 1)}" if spec.get("count", 1) != 1 else role
        for role, spec in fact.get("spec", {}).get("roles", {}).items()
    )
    return f"run{name} submitted: {roles}"


def _planned(fact: dict[str, Any], who: str) -> str:
    what = "start" if not fact.get("number") else f"restart {fact['number']}"
    parked = " as a spare" if fact.get("parked") else ""
    generation = f" in generation {fact['generation']}" if fact.get("generation") else ""
    # These reasons are what the words before say already.
    is_said = fact.get("reason") in (None, "", "generation", "spare")
    reason = "" if is_said else f": {fact['reason']}"
    return f"{who} {what} planned on {fact.get('host', '?')}{generation}{parked}{reason}"


def _started(fact: dict[str, Any], who: str) -> str:
    how = "forked warm" if fact.get("how") == "fork" else "started by exec"
    note = f" ({fact['note']})" if fact.get("note") else ""
    return f"{who} {how}, pid {fact.get('pid')}{note}"


def fault_sentence(fact: dict[str, Any], who: str = "") -> str:
    """A fault on purpose, in words."""
    if fact.get("part"):
        return f"fault {fact['number']}: the {fact['part']} is killed"
    who = who or f"rank {fact.get('rank')}"
    what = {
        "kill": "is killed",
        "stop": "is stopped",
        "slow": f"is slower by {fact.get('seconds', 0.0):g} s",
        "nan": "computes what is not finite",
        "raise": "raises an exception",
    }[fact["fault"]]
    point = f", {fact['point']}" if fact.get("point") else ""
    when = f" at step {fact['step']}{point}" if fact.get("step") is not None else ""
    return f"fault {fact['number']}: {who} {what}{when}"


def _evidence(fact: dict[str, Any], who: str) -> str:
    if fact.get("path"):
        return f"stacks of the gang of {who} kept in {fact['path']}"
    return f"no stacks of the gang of {who}: {fact.get('error') or 'nobody answered'}"


def _stopping(fact: dict[str, Any], who: str) -> str:
    how = "killed" if fact.get("level") == "kill" else "told to stop"
    return f"{who} {how}: {fact['reason']}" if fact.get("reason") else f"{who} {how}"


def _exited(fact: dict[str, Any], who: str) -> str:
    swept = fact.get("swept", 0)
    extra = f"; {swept} descendant{'s' if swept != 1 else ''} killed with it" if swept else ""
    error = error_lines(fact)
    last = f": {_short(error[-1])}" if error else ""
    return f"{who} {describe_exit(fact)}{last}{extra}"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_ERROR else f"{text[:_MOST_ERROR]}…"


def _ended(fact: dict[str, Any], who: str) -> str:
    reason = f": {fact['reason']}" if fact.get("reason") else ""
    return f"run {fact['outcome']}, exit code {fact.get('exit_code', 0)}{reason}"


def _formed(fact: dict[str, Any], who: str) -> str:
    reason = f": {fact['reason']}" if fact.get("reason") else ""
    members = format_ranks(fact["members"])
    return f"generation {fact['generation']} of {fact['role']} formed, members {members}{reason}"


def _bounded(fact: dict[str, Any], who: str) -> str:
    ranks = f"{fact['least']} to {fact['most']}"
    state = "outlives its ranks" if fact.get("keeps_state") else "ends with its first rank"
    return f"{fact['role']} can have {ranks} ranks ({fact['why']}); what it trains {state}"


def _ports(fact: dict[str, Any], who: str) -> str:
    held = ", ".join(f"{key} = {number}" for key, number in fact.get("ports", {}).items())
    return f"ports held on {fact['host']}: {held}"


_SENTENCES: dict[str, Callable[[dict[str, Any], str], str]] = {
    "host.joined": lambda f, w: (
        f"host {f['host']} joined: {f['cpus']} CPUs, {f['memory_bytes'] / 2**30:.1f} GiB, keeper {f['keeper']}"
    ),
    "host.lost": lambda f, w: f"host {f['host']} lost: {f['reason']}",
    "command.accepted": lambda f, w: f"{f['verb']} {f.get('target', '')} accepted".replace(
        "  ", " "
    ),
    "command.done": lambda f, w: f"command {f['command']} done: {f['outcome']}",
    "run.submitted": _submitted,
    "run.admitted": lambda f, w: "run admitted: it may start",
    "run.ports": _ports,
    "run.ports_refused": lambda f, w: f"a port could not be had on {f['host']}: {f['reason']}",
    "gang.formed": _formed,
    "gang.resized": lambda f, w: f"{f['role']} is to have {f['size']} ranks",
    "gang.bounded": _bounded,
    "run.saved": lambda f, w: (
        f"{w} saved step {f['step']} in {f['path']}"
        if f.get("path")
        else f"{w} had nothing to save"
    ),
    "attempt.saving": lambda f, w: f"{w} {describe_fact(f)}",
    "attempt.suspected": lambda f, w: f"{w} is suspected to hang: {f['reason']}",
    "attempt.evidence": _evidence,
    "fault.injected": fault_sentence,
    "fault.met": lambda f, w: f"fault {f['number']}: {w} has come to it",
    "attempt.planned": _planned,
    "attempt.released": lambda f, w: f"{w}: the spare joins generation {f['generation']}",
    "attempt.started": _started,
    "attempt.ready": lambda f, w: f"{w} is ready",
    "attempt.joined": lambda f, w: f"{w} knows Argosy and joined generation {f['generation']}",
    "attempt.entered": lambda f, w: f"{w} takes part in training",
    "attempt.progressed": lambda f, w: f"{w} made its first step ({f['step']})",
    "attempt.stopping": _stopping,
    "attempt.exited": _exited,
    "run.stop_requested": lambda f, w: (
        f"the run cannot succeed: {f['reason']}"
        if f.get("declared")
        else f"{'kill' if f.get('hard') else 'stop'} requested: {f.get('reason') or 'by a client'}"
    ),
    "run.ended": _ended,
    "runs.forgotten": lambda f, w: f"{len(f['runs'])} runs that ended long ago were forgotten",
    "note": lambda f, w: f"{f.get('level', 'info')}: {f['text']}",
}
