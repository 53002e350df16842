"""`argosy why`: the first cause of a failure, its evidence, its collateral, and what was done about it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from argosy.analyze.attempts import Attempt, describe_exit, error_lines
from argosy.analyze.causes import Incident, final_incident, find_incidents
from argosy.analyze.stackgroups import is_bootstrap
from argosy.cli.arguments import Arguments
from argosy.cli.connection import Controller, connect
from argosy.cli.paint import Paint, clock, duration
from argosy.errors import ArgosyError
from argosy.protocol.httpclient import Client

EVIDENCE_LINES = 12
_TAIL_BYTES = 16 << 10
MOST_EVENTS = 100_000
_CRASHES = (4, 6, 7, 8, 11)
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV."""
_NEED_INPUT = ("bdb.BdbQuit", "EOFError: EOF when reading a line")
"""How `breakpoint()` and `input()` end without a terminal."""


def why(arguments: Arguments) -> int:
    """Explain a run: alive, healed, stopped or failed."""
    controller = connect()
    view = controller.run(arguments.word())
    events = read_events(controller, view["run"])
    incidents = find_incidents(events)
    final = final_incident(events)
    if arguments.get("json"):
        print(json.dumps(_as_json(view, incidents, final)))
        return 0
    paint = Paint(sys.stdout)
    lines = [_headline(view, final, incidents)]
    # What was restarted only to fail again was not healed.
    mended = "earlier," if final else "healed"
    for position, incident in enumerate(incidents, 1):
        is_final = final is not None and incident.cause.id == final.cause.id
        title = "first cause" if is_final else f"{mended} at {clock(incident.cause.exited_at)}"
        lines += [
            "",
            paint(title, "bold", "red" if is_final else "yellow") + f": {incident.sentence}",
        ]
        has_next = position < len(incidents)
        if has_next and is_same_error(incident.cause, incidents[position].cause):
            lines.append(f"  {paint('error', 'dim')}: the same as the next")
        else:
            lines += _evidence(view, incident.cause, paint)
        if incident.collateral:
            lines.append(f"  {paint('collateral', 'dim')}: {incident.collateral}")
        lines += [f"  {paint('then', 'dim')}: {remedy}" for remedy in incident.remedy]
    more = f"more: argosy events {view['run']} · argosy logs {view['run']}"
    if view["state"] == "running":
        more += f" · argosy stacks {view['run']}"
    lines += ["", paint(more, "dim")]
    print("\n".join(lines))
    return 0


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
        return f"{paint('argosy:', 'dim')} run {run} {view['outcome']}: {view.get('reason') or 'on request'}\n"
    incident, events = None, []
    try:
        events = client.get(f"/v1/events?run={run}&limit={MOST_EVENTS}")["events"]
        incident = final_incident(events)
    except (OSError, ArgosyError):
        # The cause is evidence, not the result: without it the outcome still stands.
        pass
    head = f"{paint('argosy:', 'red')} {paint(f'run {run} failed', 'bold')}"
    if is_refused(events):
        # Its own two lines are above, once; anything more would say the same again.
        lines = [f"{head}: its program refused what it was given (exit code {view['exit_code']})"]
    elif incident is None:
        lines = [f"{head}: {view.get('reason') or 'no cause is known'}"]
        if any(event["fact"]["kind"] == "run.ports_refused" for event in events):
            lines.append("  fix: end who uses the port (`ss -ltnp`), or say 0 for any free one")
    else:
        lines = [f"{head}: {incident.sentence}", *_evidence(view, incident.cause, paint)]
        if incident.collateral:
            lines.append(f"  collateral: {incident.collateral}")
        if view.get("reason"):
            lines.append(f"  outcome: {view['reason']}")
    lines.append(f"  more: argosy why {run} · argosy logs {run} · argosy events {run}")
    return "\n".join(lines) + "\n"


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


def _headline(view: dict[str, Any], final: Incident | None, incidents: list[Incident]) -> str:
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


def _evidence(view: dict[str, Any], cause: Attempt, paint: Paint) -> list[str]:
    """Traceback or exec error, else the last lines of its log; and the file."""
    path, tail = log_tail(view["directory"], cause)
    error = error_lines(cause.exit or {})
    shown = error or tail
    lines = [f"    {paint('|', 'dim')} {line}" for line in shown[-EVIDENCE_LINES:]]
    unsaid = [line for line in tail if line not in error] if error else []
    if unsaid:
        lines.append(f"  {paint('last output', 'dim')}:")
        lines += [f"    {paint('|', 'dim')} {line}" for line in unsaid[-4:]]
    lines += _stacks(cause, paint)
    if path:
        lines.append(f"  {paint('log', 'dim')}: {path}")
    if cause.how == "fork" and not shown and (cause.exit or {}).get("signal") in _CRASHES:
        lines.append("  fix: `--env PYTHONFAULTHANDLER=1` makes it tell where it crashed")
    if shown and shown[-1].startswith(_NEED_INPUT):
        lines.append("  fix: stdin is empty; `argosy run --tty` gives one process a terminal")
    return lines


def _stacks(cause: Attempt, paint: Paint) -> list[str]:
    """Where its gang stood when it was suspected, odd ones first."""
    found = read_stacks(cause.evidence)
    if not found:
        return []
    from argosy.analyze.stackgroups import group_stacks
    from argosy.cli.stacks import render_group

    lines = [f"  {paint('stacks when it was suspected', 'dim')}: {cause.evidence}"]
    for group in group_stacks(found):
        block = render_group(group, len(found), paint, show_all=False)
        lines += [f"    {line}" for line in block.splitlines()]
    return lines


def read_stacks(path: str) -> list[dict[str, Any]]:
    """The stacks in a file of evidence; none when there is no such file."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            found: list[dict[str, Any]] = json.load(file)["stacks"]
            return found
    except (OSError, ValueError, KeyError):
        return []


def is_same_error(one: Attempt, other: Attempt) -> bool:
    """Did both end in the same way with the same error?"""
    first, second = one.exit or {}, other.exit or {}
    error = error_lines(first)
    return (
        bool(error)
        and describe_exit(first) == describe_exit(second)
        and error[-1] == (error_lines(second) or [""])[-1]
    )


def log_tail(directory: str, attempt: Attempt) -> tuple[str, list[str]]:
    """The attempt's log file that says most about its end, and its last lines."""
    stem = os.path.join(directory, "logs", f"{attempt.role}.{attempt.index}.{attempt.number}")
    fallback = ""
    for path in (f"{stem}.err", f"{stem}.out"):
        try:
            with open(path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - _TAIL_BYTES))
                text = file.read().decode("utf-8", "replace").strip("\0\n")
        except OSError:
            continue
        fallback = fallback or path
        if text.strip():
            prefix = f"[rank{attempt.rank}]: "
            lines = [line.removeprefix(prefix) for line in readable_lines(text)]
            return path, _crash_lines(lines) or lines[-EVIDENCE_LINES:]
    return fallback, []


def _crash_lines(lines: list[str]) -> list[str]:
    """The dump of Python's fault handler, without the frames below the program: it tells most at its beginning."""
    starts = [n for n, line in enumerate(lines) if line.startswith("Fatal Python error:")]
    if not starts:
        return []
    kept = [
        line
        for line in lines[starts[-1] :]
        if not line.startswith("Extension modules:") and not is_bootstrap(line)
    ]
    return kept[:EVIDENCE_LINES]


def readable_lines(text: str) -> list[str]:
    """Lines as a terminal would show them in the end: overwritten parts and control sequences left out."""
    import re

    plain = re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])", "", text)
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in plain.split("\n")]
    return ["".join(c for c in line if c == "\t" or c.isprintable()) for line in lines if line]


def _as_json(
    view: dict[str, Any], incidents: list[Incident], final: Incident | None
) -> dict[str, Any]:
    return {
        "run": view["run"],
        "name": view["name"],
        "state": view["state"],
        "outcome": view["outcome"],
        "exit_code": view["exit_code"],
        "reason": view["reason"],
        "first_cause": _incident_json(view, final) if final else None,
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
