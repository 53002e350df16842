"""`argosy queue`: runs that wait for CPU and memory; add to it, take from it."""

from __future__ import annotations

import json
import sys
from typing import Any

from argosy.cli.arguments import Arguments
from argosy.cli.connection import connect
from argosy.cli.paint import Paint, render_table, size
from argosy.cli.program import read_program
from argosy.cli.run import print_handles, submit_program
from argosy.control.home import open_cluster
from argosy.errors import NotFoundError

HEADERS = ["RUN", "NAME", "PRIORITY", "SHARE", "CPUS", "MEMORY", "AHEAD"]


def show(arguments: Arguments) -> int:
    """Print the queue in the order in which it is admitted."""
    answer = connect().get("/v1/queue")
    if arguments.get("json"):
        print(json.dumps(answer))
        return 0
    entries = _entries(answer)
    if not entries:
        print("the queue is empty")
        return 0
    rows = [_row(entry) for entry in entries]
    sys.stdout.write(render_table(HEADERS, rows, Paint(sys.stdout)))
    return 0


def add(arguments: Arguments) -> int:
    """Submit a run that waits in the queue; prints the ids and returns."""
    program = read_program(arguments)
    program.spec["queued"] = True
    print_handles(submit_program(program, open_cluster()), arguments)
    return 0


def cancel(arguments: Arguments) -> int:
    """Take a run, or all runs of an array, out of the queue; running ones are stopped gracefully."""
    controller = connect()
    views = controller.array(arguments.word()) or [controller.run(arguments.word())]
    alive = [view for view in views if view["state"] != "ended"]
    if not alive:
        has = "has" if len(views) == 1 else f"and {len(views) - 1} others have"
        raise NotFoundError(
            f"run {views[-1]['run']} {has} already {views[-1]['outcome'] or 'ended'}",
            fix="see `argosy queue`",
        )
    for view in alive:
        answer = controller.post(
            f"/v1/runs/{view['run']}/stop", {"hard": False, "reason": "argosy queue cancel"}
        )
        print(
            json.dumps({"run": view["run"], **answer})
            if arguments.get("json")
            else f"{view['run']} cancelled"
        )
    return 0


def _entries(answer: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = answer["queue"] if isinstance(answer, dict) else answer
    return entries


def _row(entry: dict[str, Any]) -> list[str]:
    memory = entry.get("memory_bytes") or 0
    return [
        str(entry["run"]),
        str(entry.get("name") or "-"),
        str(entry.get("priority", 0)),
        str(entry.get("share") or "-"),
        f"{entry.get('cpus') or 0:g}",
        size(memory) if memory else "-",
        str(entry.get("ahead", "-")),
    ]
