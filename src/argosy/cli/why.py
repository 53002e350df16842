"""`argosy why`: how a run ended or stands, and its failures in order of time: the first cause with its evidence, what followed, what was healed before."""

from __future__ import annotations

import json
import sys
from typing import Any

from argosy.analyze.attempts import Attempt, describe_exit
from argosy.analyze.causes import Incident, final_incident, find_incidents, first_of_kind
from argosy.cli.arguments import Arguments
from argosy.cli.connection import Controller, connect
from argosy.cli.evidence import is_same_error, log_tail, show_evidence
from argosy.cli.paint import Paint, clock, duration
from argosy.cli.saves import loss_of, newest_save
from argosy.errors import ArgosyError
from argosy.protocol.httpclient import Client

MOST_EVENTS = 100_000
_UNDER_WAY = ("waiting", "planned", "starting")


def why(arguments: Arguments) -> int:
    """Explain a run: alive, healed, stopped or failed."""
    controller = connect()
    view = controller.run(arguments.word())
    events = read_events(controller, view["run"])
    if arguments.get("json"):
        incidents = find_incidents(events)
        print(json.dumps(_as_json(view, incidents, _first_cause(view, events, incidents))))
        return 0
    print("\n".join(explain(view, events, Paint(sys.stdout))))
    return 0


def explain(view: dict[str, Any], events: list[dict[str, Any]], paint: Paint) -> list[str]:
    """The story in lines: how the run ended or stands, then every failure in order of time; the cause of how it is, is marked."""
    incidents = find_incidents(events)
    lead = _first_cause(view, events, incidents)
    lines = [_headline(view, incidents), *_save_lines(view, events)]
    told = None
    for incident in sorted(incidents, key=lambda each: each.cause.exited_at):
        title = _relation(view, incident, lead)
        color = "red" if incident is lead else "yellow"
        if incident is not lead or len(incidents) > 1:
            title += f" at {clock(incident.cause.exited_at)}"
        lines += ["", paint(title, "bold", color) + f": {incident.sentence}"]
        lines += _details(view, incident, told, paint)
        told = incident
    more = f"more: argosy events {view['run']} · argosy logs {view['run']}"
    if view["state"] == "running":
        more += f" · argosy stacks {view['run']}"
    return [*lines, "", paint(more, "dim")]


def _save_lines(view: dict[str, Any], events: list[dict[str, Any]]) -> list[str]:
    """Of a run that did not come to its end: the newest checkpoint, and how to go on with it."""
    if view["state"] != "ended" or view["outcome"] == "succeeded":
        return []
    save = newest_save(view, events)
    return [f"  {line}" for line in save.lines()] if save else []


def _first_cause(
    view: dict[str, Any], events: list[dict[str, Any]], incidents: list[Incident]
) -> Incident | None:
    """Of how the run ended, or of how it stands: of failures that only repeated themselves the first."""
    final = final_incident(events)
    last = next((each for each in incidents if final and each.cause.id == final.cause.id), None)
    last = last or _present_cause(view, incidents)
    return first_of_kind(incidents, last) if last else None


def _present_cause(view: dict[str, Any], incidents: list[Incident]) -> Incident | None:
    """The failure that a run which is alive has not got over yet: processes of that role are still to be started again."""
    if view["state"] == "ended" or not incidents:
        return None
    newest = incidents[-1]
    processes = [p for r in view["roles"] if r["role"] == newest.cause.role for p in r["processes"]]
    return newest if any(p["state"] in _UNDER_WAY for p in processes) else None


def _relation(view: dict[str, Any], incident: Incident, lead: Incident | None) -> str:
    if lead is None:
        is_healed = view["outcome"] == "succeeded" or incident.is_mended
        return "healed" if is_healed else "not mended,"
    if incident is lead:
        return "first cause"
    # What was restarted only to fail again was not healed.
    return "earlier," if incident.cause.exited_at <= lead.cause.exited_at else "after that,"


def _details(
    view: dict[str, Any], incident: Incident, told: Incident | None, paint: Paint
) -> list[str]:
    """Below an incident's sentence: its evidence, unless it is that of the one told last; collateral; remedies."""
    lines = []
    if told is not None and is_same_error(incident.cause, told.cause):
        lines.append(f"  {paint('error', 'dim')}: the same as above")
    else:
        lines += show_evidence(view, incident.cause, paint)
    if incident.collateral:
        lines.append(f"  {paint('collateral', 'dim')}: {incident.collateral}")
    return lines + [f"  {paint('then', 'dim')}: {remedy}" for remedy in incident.remedy]


def report_end(view: dict[str, Any], client: Client) -> int:
    """Say how it ended if it did not end well; the exit code."""
    code = int(view.get("exit_code") or 0)
    if view["outcome"] == "succeeded":
        return 0
    sys.stdout.flush()
    sys.stderr.write(explain_failure(client, view))
    return code or 1


def explain_failure(client: Client, view: dict[str, Any]) -> str:
    """The end of a run that did not succeed, for stderr: cause, last lines, log file, collateral, how to see more."""
    paint = Paint(sys.stderr)
    run = view["run"]
    if view["outcome"] in ("stopped", "cancelled"):
        lines = [
            f"{paint('argosy:', 'dim')} run {run} {view['outcome']}: {view.get('reason') or 'on request'}"
        ]
        if loss_of(view):
            lines += _save_lines(view, _events_if_any(client, run))
        return "\n".join(lines) + "\n"
    events = _events_if_any(client, run)
    incident = final_incident(events)
    head = f"{paint('argosy:', 'red')} {paint(f'run {run} failed', 'bold')}"
    if is_refused(events):
        # Its own two lines are above, once; anything more would say the same again.
        has_trained = any(event["fact"]["kind"] == "run.saved" for event in events)
        why = "gave it up" if has_trained else "refused what it was given"
        lines = [f"{head}: its program {why} (exit code {view['exit_code']})"]
    elif incident is None:
        lines = [f"{head}: {view.get('reason') or 'no cause is known'}"]
        if any(event["fact"]["kind"] == "run.ports_refused" for event in events):
            lines.append("  fix: end who uses the port (`ss -ltnp`), or say 0 for any free one")
    else:
        lines = [f"{head}: {incident.sentence}", *show_evidence(view, incident.cause, paint)]
        if incident.collateral:
            lines.append(f"  collateral: {incident.collateral}")
        if view.get("reason"):
            lines.append(f"  outcome: {view['reason']}")
    lines.append(f"  more: argosy why {run} · argosy logs {run} · argosy events {run}")
    return "\n".join(lines) + "\n"


def _events_if_any(client: Client, run: str) -> list[dict[str, Any]]:
    """They are evidence, not the result: without them the outcome still stands."""
    try:
        events: list[dict[str, Any]] = client.get(f"/v1/events?run={run}&limit={MOST_EVENTS}")[
            "events"
        ]
    except (OSError, ArgosyError):
        return []
    return events


def is_refused(events: list[dict[str, Any]]) -> bool:
    """Whether the program itself ended the run over wrong input: it has said what is wrong and the fix."""
    facts = (event["fact"] for event in events)
    return any(
        fact["kind"] == "run.stop_requested" and fact.get("code") is not None for fact in facts
    )


def read_events(controller: Controller, run: str) -> list[dict[str, Any]]:
    """All events of a run."""
    events: list[dict[str, Any]] = controller.get(f"/v1/events?run={run}&limit={MOST_EVENTS}")[
        "events"
    ]
    return events


def _headline(view: dict[str, Any], incidents: list[Incident]) -> str:
    name = f" ({view['name']})" if view.get("name") else ""
    who = f"run {view['run']}{name}"
    if view["state"] != "ended":
        waits = f": {view['waiting']}" if view.get("waiting") else ""
        healed = (
            f", after {len(incidents)} failure{'s' if len(incidents) != 1 else ''}"
            if incidents
            else ""
        )
        return f"{who} is {view['state']}{waits}{healed}"
    took = ""
    if view.get("started_at") and view.get("ended_at"):
        took = f" after {duration(view['ended_at'] - view['started_at'])}"
    if view["outcome"] == "succeeded":
        return f"{who} succeeded{took}" + (
            f"; {len(incidents)} failure{'s were' if len(incidents) != 1 else ' was'} healed"
            if incidents
            else ""
        )
    reason = f": {view['reason']}" if view.get("reason") else ""
    code = f", exit code {view['exit_code']}" if view["outcome"] == "failed" else ""
    return f"{who} {view['outcome']}{took}{code}{reason}"


def _as_json(
    view: dict[str, Any], incidents: list[Incident], lead: Incident | None
) -> dict[str, Any]:
    return {
        "run": view["run"],
        "name": view["name"],
        "state": view["state"],
        "outcome": view["outcome"],
        "exit_code": view["exit_code"],
        "reason": view["reason"],
        "first_cause": _incident_json(view, lead) if lead else None,
        "incidents": [_incident_json(view, incident) for incident in incidents],
    }


def _incident_json(view: dict[str, Any], incident: Incident) -> dict[str, Any]:
    path, tail = log_tail(view["directory"], incident.cause)
    return {
        "sentence": incident.sentence,
        "cause": _attempt_json(incident.cause),
        "failed_after": [_attempt_json(attempt) for attempt in incident.failed_after],
        "stopped": [_attempt_json(attempt) for attempt in incident.stopped],
        "then": incident.remedy,
        "error": (incident.cause.exit or {}).get("error", ""),
        "evidence": incident.cause.evidence,
        "log": path,
        "last_lines": tail,
    }


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    exit_fact = attempt.exit or {}
    return {
        "attempt": attempt.id,
        "role": attempt.role,
        "index": attempt.index,
        "rank": attempt.rank,
        "number": attempt.number,
        "generation": attempt.generation,
        "host": attempt.host,
        "pid": attempt.pid,
        "code": exit_fact.get("code"),
        "signal": exit_fact.get("signal"),
        "at": attempt.exited_at,
        "how": describe_exit(exit_fact),
    }
