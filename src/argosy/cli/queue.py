"""`argosy queue`: runs that wait for CPU and memory, and why; add to it, take from it."""

from __future__ import annotations

import json
import sys
from typing import Any

from argosy.cli.arguments import Arguments
from argosy.cli.connection import Controller, connect, describe_end
from argosy.cli.paint import Paint, render_table, size
from argosy.cli.program import read_program
from argosy.cli.run import leave_alone, print_handles, submit_program
from argosy.cli.shield import Shield
from argosy.control.home import open_cluster
from argosy.errors import NotFoundError

HEADERS = ["RUN", "NAME", "PRIORITY", "SHARE", "CPUS", "MEMORY", "AHEAD", "WHY"]


def show(arguments: Arguments) -> int:
    """Print the queue in the order in which it is admitted."""
    answer = connect().get("/v1/queue")
    if arguments.get("json"):
        print(json.dumps(answer))
        return 0
    if not answer["queue"]:
        print("the queue is empty")
        return 0
    rows = [row_of(entry) for entry in answer["queue"]]
    sys.stdout.write(render_table(HEADERS, rows, Paint(sys.stdout)))
    return 0


def add(arguments: Arguments) -> int:
    """Submit a run that waits in the queue; prints the ids and returns."""
    program = read_program(arguments)
    program.spec["queued"] = True
    shield = Shield()
    handles = submit_program(program, open_cluster(), shield)
    print_handles(handles, arguments)
    leave_alone(handles, shield)
    return 0


def cancel(arguments: Arguments) -> int:
    """Take runs out of the queue; those that run already are stopped gracefully."""
    runs = cancel_runs(connect(), arguments.word())
    if arguments.get("json"):
        print(json.dumps({"runs": runs}))
        return 0
    for run in runs:
        what = "cancelled" if run["was_queued"] else "is being stopped"
        print(f"{run['run']} ({run['name']}) {what}")
    return 0


def cancel_runs(controller: Controller, word: str) -> list[dict[str, Any]]:
    """End what a person means: by an id or the beginning of one that run, by a name all runs of that name, arrays too, that have not ended."""
    body = {"runs": [word], "reason": "argosy queue cancel"}
    runs: list[dict[str, Any]] = controller.post("/v1/stop", body)["runs"]
    if not runs:
        body["runs"] = [find_alive(controller, word)["run"]]
        runs = controller.post("/v1/stop", body)["runs"]
    return runs


def find_alive(controller: Controller, word: str) -> dict[str, Any]:
    """The run whose id begins so; NotFoundError when nothing that is meant is alive."""
    views = controller.all_named(word) or [controller.run(word)]
    for view in views:
        if view["state"] != "ended":
            return view
    all_ended = f"all {len(views)} runs of {word} have already ended"
    what = describe_end(views[0]) if len(views) == 1 else all_ended
    raise NotFoundError(what, fix="see `argosy ps --all`")


def row_of(entry: dict[str, Any]) -> list[str]:
    """One waiting run for the table."""
    memory = entry.get("memory_bytes") or 0
    return [
        str(entry["run"]),
        str(entry.get("name") or "-"),
        str(entry.get("priority", 0)),
        str(entry.get("share") or "-"),
        f"{entry.get('cpus') or 0:g}",
        size(memory) if memory else "-",
        str(entry.get("ahead", "-")),
        # The state is the table's own subject.
        str(entry.get("why") or "").removeprefix("queued: "),
    ]
