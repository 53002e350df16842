"""`argosy tree`: the parts of the cluster, its runs, roles and processes with their children."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from argosy.cli.arguments import Arguments
from argosy.cli.connection import MOST_LISTED, connect
from argosy.cli.paint import STATE_STYLES, Paint, duration
from argosy.cli.ps import age, state_of, why_of

Node = tuple[str, list[Any]]


def tree(arguments: Arguments) -> int:
    """Print the tree, or the same as JSON."""
    controller = connect()
    status = controller.get("/v1/status")
    if arguments.words:
        runs = [controller.run(arguments.word())]
    else:
        flag = int(bool(arguments.get("all")))
        runs = controller.get(f"/v1/runs?all={flag}&limit={MOST_LISTED}")["runs"]
    pids = [p["pid"] for v in runs for r in v["roles"] for p in r["processes"] if p.get("pid")]
    children = read_children()
    give_back((status.get("pids") or {}).get("keeper", 0), pids, children)
    if arguments.get("json"):
        inner = {pid: descendants(pid, children) for pid in pids}
        print(json.dumps({"status": status, "runs": runs, "descendants": inner}))
        return 0
    paint = Paint(sys.stdout)
    parts: list[Node] = [
        (f"{name} {paint(str(pid), 'dim')}", []) for name, pid in (status.get("pids") or {}).items()
    ]
    root: Node = (
        f"cluster {controller.cluster.key}, up for {duration(float(status.get('uptime_seconds', 0)))}",
        [*parts, *(run_node(view, children, paint) for view in runs)],
    )
    print("\n".join(render(root)))
    return 0


def run_node(view: dict[str, Any], children: dict[int, list[int]], paint: Paint) -> Node:
    """A run with its roles and processes."""
    state = view["outcome"] if view["state"] == "ended" else view["state"]
    waiting = str(view.get("waiting") or "").removeprefix(f"{state}: ")
    why = f": {waiting}" if waiting else ""
    title = f"run {paint(view['run'], 'bold')} {view.get('name') or ''} {_state(state, paint)}{why}"
    roles: list[Node] = []
    for role in view["roles"]:
        generation = f", generation {role['generation']}" if role.get("gang") else ""
        kind = f"gang of {role['count']}" if role.get("gang") else f"x{role['count']}"
        processes = [_process_node(p, view, children, paint) for p in role["processes"]]
        roles.append((f"{role['role']} ({kind}{generation})", processes))
    return title, roles


def _process_node(
    process: dict[str, Any], view: dict[str, Any], children: dict[int, list[int]], paint: Paint
) -> Node:
    rank = f"rank {process['rank']}" if process.get("rank") is not None else f"#{process['index']}"
    pid = f" pid {process['pid']}" if process.get("pid") else ""
    why = why_of(process, view)
    old = age(process, view, time.time())
    title = (
        f"{rank} {_state(state_of(process, view), paint)}{pid}, {old}{f': {why}' if why else ''}"
    )
    is_alive = process.get("pid") and process["state"] != "exited"
    inner = _child_nodes(process["pid"], children) if is_alive else []
    return title, inner


def _child_nodes(pid: int, children: dict[int, list[int]]) -> list[Node]:
    return [
        (f"{child} {command_of(child)}", _child_nodes(child, children))
        for child in children.get(pid, [])
    ]


def render(node: Node, prefix: str = "") -> list[str]:
    """Lines of a tree with its branches drawn."""
    lines = [node[0]] if not prefix else []
    for position, child in enumerate(node[1]):
        is_last = position == len(node[1]) - 1
        lines.append(f"{prefix}{'└─' if is_last else '├─'} {child[0]}")
        below = prefix + ("   " if is_last else "│  ")
        lines += render((child[0], child[1]), below)
    return lines


def read_children() -> dict[int, list[int]]:
    """Parent pid -> pids of its living children, of this machine at this moment."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="latin-1") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry))
    return children


def give_back(keeper: int, leaders: list[int], children: dict[int, list[int]]) -> None:
    """Children that have left their parent hang under the keeper: put those that a cgroup shows to be a process's own below it."""
    owners = {group_of(pid): pid for pid in leaders}
    for shared in (group_of(keeper), ""):  # without a cgroup for each process nothing is known
        owners.pop(shared, None)
    for pid in children.get(keeper, [])[:]:
        owner = owners.get(group_of(pid), pid)
        if owner != pid and pid not in leaders:
            children[keeper].remove(pid)
            children.setdefault(owner, []).append(pid)


def group_of(pid: int) -> str:
    """The cgroups of a process; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    """All below a process."""
    found = []
    for child in children.get(pid, []):
        found += [child, *descendants(child, children)]
    return found


def command_of(pid: int) -> str:
    """The beginning of a process's command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(400).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""
    return words if len(words) < 80 else words[:79] + "…"


def _state(state: str, paint: Paint) -> str:
    return paint(state, *STATE_STYLES.get(state, ()))
