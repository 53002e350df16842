"""`argosy stacks`: where every rank stands, like ones together, odd ones first."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.parse import urlencode

from argosy.analyze.stackgroups import (
    StackGroup,
    group_stacks,
    is_library,
    main_thread,
    without_bootstrap,
)
from argosy.cli.arguments import Arguments
from argosy.cli.connection import connect
from argosy.cli.paint import Paint
from argosy.cli.progress import Progress

SHOWN_FRAMES = 12


def stacks(arguments: Arguments) -> int:
    """Take and print the stacks."""
    controller = connect()
    target, view = controller.resolve(arguments.word(), to_act=True)
    query = {"role": target.role, "index": target.index}
    text = urlencode({key: value for key, value in query.items() if value is not None})
    with Progress().during("taking the stacks"):
        answer = controller.get(f"/v1/runs/{view['run']}/stacks{'?' + text if text else ''}")
    if arguments.get("json"):
        print(json.dumps(answer))
        return 0
    found: list[dict[str, Any]] = answer["stacks"]
    if not found:
        print(f"no process of run {view['run']} is running")
        return 0
    paint = Paint(sys.stdout)
    groups = group_stacks(found)
    blocks = [
        render_group(group, len(found), paint, show_all=bool(arguments.get("all")))
        for group in groups
    ]
    print("\n\n".join(blocks))
    return 0


def render_group(group: StackGroup, total: int, paint: Paint, *, show_all: bool) -> str:
    """One group: who, where, and the frames, innermost first."""
    is_odd = len(group.members) * 2 < total
    label = paint(group.label, "bold", "red" if is_odd else "green")
    lines = [f"{label} {len(group.members)} of {total} {paint(group.place, 'bold')}"]
    if group.halt:
        pids = ", ".join(str(member.get("pid")) for member in group.members)
        lines.append(f"    {paint('state', 'dim')}: {group.halt} (pid {pids})")
    if show_all:
        for member in group.members:
            lines += _threads(member, paint)
        return "\n".join(lines)
    shown = group.frames[:SHOWN_FRAMES]
    lines += [_frame(frame, paint) for frame in shown]
    if len(group.frames) > len(shown):
        lines.append(paint(f"    … {len(group.frames) - len(shown)} more (--all)", "dim"))
    others = max((len(m.get("threads") or []) for m in group.members), default=0) - 1
    if others > 0:
        lines.append(paint(f"    {others} other thread{'s' if others > 1 else ''} (--all)", "dim"))
    return "\n".join(lines)


def _threads(member: dict[str, Any], paint: Paint) -> list[str]:
    who = (
        f"rank {member['rank']}"
        if member.get("rank") is not None
        else f"{member['role']}/{member['index']}"
    )
    lines = [f"  {paint(who, 'bold')}, pid {member.get('pid')}, by {member.get('source')}"]
    main = main_thread(member)
    for thread in sorted(member.get("threads") or [], key=lambda t: t is not main):
        marks = [
            m for m, key in (("holds the GIL", "owns_gil"), ("active", "active")) if thread.get(key)
        ]
        lines.append(
            f"  thread {thread.get('name') or '?'}{' (' + ', '.join(marks) + ')' if marks else ''}"
        )
        lines += [_frame(frame, paint) for frame in without_bootstrap(thread.get("frames", []))]
    return lines


def _frame(frame: dict[str, Any], paint: Paint) -> str:
    text = f"    {frame['function']} ({frame['file']}:{frame['line']})"
    return paint(text, "dim") if is_library(frame["file"]) else text
