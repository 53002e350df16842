"""`argosy ps`: the processes of the runs, and why some wait."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from argosy.cli.arguments import Arguments
from argosy.cli.connection import MOST_LISTED, Target, connect, processes_of
from argosy.cli.paint import Paint, duration, render_table

HEADERS = ["RUN", "NAME", "ROLE/INDEX", "RANK", "STATE", "PID", "RESTARTS", "AGE", "WHY"]


def ps(arguments: Arguments) -> int:
    """Print the table, or with --json the runs as the API shows them."""
    controller = connect()
    if arguments.words:
        target, view = controller.resolve(arguments.word())
        runs = [view]
    else:
        target = None
        flag = int(bool(arguments.get("all")))
        runs = controller.get(f"/v1/runs?all={flag}&limit={MOST_LISTED}")["runs"]
    if arguments.get("json"):
        print(json.dumps({"runs": runs}))
        return 0
    rows = [row for view in runs for row in rows_of(view, target, time.time())]
    if not rows:
        print("no run is alive; `argosy ps --all` shows those that have ended")
        return 0
    sys.stdout.write(render_table(HEADERS, rows, Paint(sys.stdout), state_column=4))
    return 0


def rows_of(view: dict[str, Any], target: Target | None, now: float) -> list[list[str]]:
    """One row for each process; one for a run that has none yet."""
    name = view.get("name") or "-"
    rows = [
        [
            view["run"],
            name,
            f"{process['role']}/{process['index']}",
            "-" if process.get("rank") is None else str(process["rank"]),
            state_of(process, view),
            str(process.get("pid") or "-"),
            str(process.get("restarts", 0)),
            age(process, view, now),
            why_of(process, view),
        ]
        for process in processes_of(view, target)
    ]
    if not rows and target is None:
        state = view["outcome"] if view["state"] == "ended" else view["state"]
        waited = duration(now - view["submitted_at"])
        why = view.get("waiting") or view.get("reason") or ""
        rows.append([view["run"], name, "-", "-", state or "?", "-", "-", waited, why])
    return rows


def state_of(process: dict[str, Any], view: dict[str, Any]) -> str:
    """The state; of a process that has failed, that. What was stopped with its run did not fail."""
    has_failed = process.get("signal") or process.get("code")
    if process["state"] == "exited" and has_failed and view.get("outcome") in (None, "", "failed"):
        return "failed"
    return str(process["state"])


def why_of(process: dict[str, Any], view: dict[str, Any]) -> str:
    """Why it waits, or how it ended."""
    if process.get("waiting"):
        return str(process["waiting"])
    if process["state"] == "exited":
        if process.get("signal") is not None or process.get("code") is not None:
            from argosy.analyze.attempts import describe_exit

            return describe_exit(process)
        return str(view.get("reason") or "")
    if process["state"] == "stopped":
        return f"a signal stopped it; kill -CONT {process['pid']} lets it go on"
    if process["state"] in ("waiting", "planned"):
        return str(view.get("waiting") or "")
    return f"works for {view['helps']}" if view.get("helps") else ""


def age(process: dict[str, Any], view: dict[str, Any], now: float) -> str:
    """Time since the attempt's start; of a run that has ended, how long it took."""
    started = process.get("started_at")
    if not started:
        return "-"
    return duration((view.get("ended_at") or now) - started)
