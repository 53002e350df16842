"""Stack groups: processes that stand at the same place shown once, odd ones first.

Called by `argosy stacks`. Pure, over the objects of `GET /v1/runs/{run}/stacks`. When one of many ranks is stuck, the small
group is the answer, so groups are ordered by size.
"""

from __future__ import annotations

from typing import Any

from argosy.analyze.ranksets import format_ranks

_BOOTSTRAP = ("argosy/control/zygote/", "<frozen runpy>")
"""Frames below the user's program in a process that was forked warm: the same in all, and nobody's business."""
_HALTS = {
    "T": "stopped by a signal; `kill -CONT PID` lets it go on",
    "t": "held by a debugger",
    "D": "waits inside the kernel, for a disk or a network file system",
    "Z": "has ended",
}
_LIBRARY = ("/site-packages/", "/lib/python3", "<frozen ")


class StackGroup:
    """Processes whose main threads have the same frames."""

    __slots__ = ("error", "frames", "members")

    def __init__(self, frames: list[dict[str, Any]], error: str) -> None:
        self.frames = frames
        self.error = error
        self.members: list[dict[str, Any]] = []

    @property
    def label(self) -> str:
        """`[0,1,3]` for one gang, `[web/0]` else."""
        ranks = [m["rank"] for m in self.members if m.get("rank") is not None]
        others = [f"{m['role']}/{m['index']}" for m in self.members if m.get("rank") is None]
        parts = ([format_ranks(ranks)] if ranks else []) + others
        return f"[{','.join(parts)}]"

    @property
    def halt(self) -> str:
        """Why the kernel does not let these processes run, or nothing."""
        return halt_of(self.members[0])

    @property
    def place(self) -> str:
        """One phrase: where it stands, in the user's own code if there is any."""
        if self.error:
            return f"no stack: {self.error}"
        if not self.frames:
            return "no Python frames"
        own = next((f for f in self.frames if not is_library(f["file"])), None)
        inner = self.frames[0]
        at = f"{inner['function']} ({_short(inner['file'])}:{inner['line']})"
        if own is None or own is inner:
            return f"in {at}"
        return f"in {at}, called from {own['function']} ({_short(own['file'])}:{own['line']})"


def group_stacks(stacks: list[dict[str, Any]]) -> list[StackGroup]:
    """Groups of like stacks, the smallest first; ties by the lowest rank."""
    groups: dict[tuple[Any, ...], StackGroup] = {}
    for stack in stacks:
        error = str(stack.get("error") or "")
        frames = without_bootstrap(main_thread(stack).get("frames", []))
        signature: tuple[Any, ...] = tuple((f["function"], f["file"], f["line"]) for f in frames)
        if not frames:
            signature = ("", error)
        # A process that cannot run is odd, wherever it stands.
        signature = (halt_of(stack), *signature)
        group = groups.setdefault(signature, StackGroup(frames, "" if frames else error))
        group.members.append(stack)
    return sorted(groups.values(), key=lambda g: (not g.halt, len(g.members), _lowest(g)))


def halt_of(stack: dict[str, Any]) -> str:
    """Why the kernel does not let a process run, from its state (`T (stopped)`); nothing when it could run."""
    return _HALTS.get(str(stack.get("state") or "")[:1], "")


def main_thread(stack: dict[str, Any]) -> dict[str, Any]:
    """The main thread of a process; else the one that holds the GIL, else the first."""
    threads: list[dict[str, Any]] = stack.get("threads") or []
    for thread in threads:
        if thread.get("name") == "MainThread":
            return thread
    for thread in threads:
        if thread.get("owns_gil"):
            return thread
    return threads[0] if threads else {}


def without_bootstrap(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Frames, innermost first, without those that started the program."""
    end = len(frames)
    while end and is_bootstrap(frames[end - 1]["file"]):
        end -= 1
    return frames[:end] or frames


def is_bootstrap(file: str) -> bool:
    """A frame that only started the program."""
    return any(part in file for part in _BOOTSTRAP)


def is_library(file: str) -> bool:
    """Not the user's own code."""
    return any(part in file for part in _LIBRARY)


def _lowest(group: StackGroup) -> tuple[str, int]:
    return min(
        (m["role"], m["rank"] if m.get("rank") is not None else m["index"]) for m in group.members
    )


def _short(file: str) -> str:
    for part in _LIBRARY[:2]:
        if part in file:
            return (
                file.split(part, 1)[1].split("/", 1)[-1]
                if part == "/lib/python3"
                else file.split(part, 1)[1]
            )
    return file
