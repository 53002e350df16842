"""Stacks of running processes: from outside by py-spy, and where that fails by the process's own armed C handler.

`take_stacks()` is called by the agent for the `stacks` errand. Nothing is stopped, nothing is changed, and a signal is sent only to a
process that has a handler for it: an unarmed one would die.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import time
from typing import Any

_AT_ONCE = 4
_PY_SPY_SECONDS = 15.0
_HANDLER_SECONDS = 2.0
STACK_SIGNAL = signal.SIGRTMIN + 8
"""Where the runtime arms faulthandler in its ranks."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")

Stack = dict[str, Any]


class Target:
    """A process whose stacks are wanted."""

    __slots__ = ("attempt", "pid", "stderr")

    def __init__(self, attempt: str, pid: int, stderr: str) -> None:
        self.attempt = attempt
        self.pid = pid
        self.stderr = stderr


async def take_stacks(targets: list[Target], *, seconds: float | None = None) -> list[Stack]:
    """The stacks of all targets, a few at a time; one that cannot be had, or not in time, says why."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def take(target: Target) -> Stack:
        async with turn:
            return await _take(target)

    tasks = [asyncio.create_task(take(target)) for target in targets]
    if not tasks:
        return []
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return [
        _blank(target, error=f"no stack within {seconds:g} s") if task in late else task.result()
        for target, task in zip(targets, tasks, strict=True)
    ]


def _blank(target: Target, *, error: str = "") -> Stack:
    return {
        "attempt": target.attempt,
        "pid": target.pid,
        "state": process_state(target.pid),
        "source": "py-spy",
        "threads": [],
        "error": error,
    }


async def _take(target: Target) -> Stack:
    stack = _blank(target)
    threads, error = await _by_py_spy(target.pid)
    if threads:
        return {**stack, "threads": threads}
    if is_armed(target.pid):
        threads = await _by_handler(target)
        if threads:
            return {**stack, "threads": threads, "source": "faulthandler"}
        error = f"{error}; its handler wrote nothing"
    return {**stack, "error": error}


async def _by_py_spy(pid: int) -> tuple[list[Stack], str]:
    program = _find_py_spy()
    if program is None:
        return [], "py-spy is not installed"
    argv = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_PY_SPY_SECONDS):
            output, errors = await process.communicate()
    except TimeoutError:
        return [], f"py-spy gave no answer in {_PY_SPY_SECONDS:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        return [], _why_none(errors.decode("utf-8", "replace"), process.returncode or 0)
    try:
        return [_py_spy_thread(thread) for thread in json.loads(output)], ""
    except (ValueError, KeyError, TypeError) as error:
        return [], f"py-spy's answer could not be read: {error}"


def _why_none(said: str, code: int) -> str:
    """What py-spy says first; where it was when it said so follows, and is nobody's business."""
    first = said.strip().partition("\n")[0].removeprefix("Error: ")
    if "python version" in first:
        return "it is no Python process"
    return first or f"py-spy exited with {code}"


def _py_spy_thread(thread: dict[str, Any]) -> Stack:
    return {
        "name": thread.get("thread_name") or "",
        "active": bool(thread.get("active")),
        "owns_gil": bool(thread.get("owns_gil")),
        "frames": [
            {"function": frame["name"], "file": frame["filename"], "line": frame["line"]}
            for frame in thread["frames"]
        ],
    }


async def _by_handler(target: Target) -> list[Stack]:
    """Send the signal and read what the handler appends to the process's error output."""
    try:
        begin = os.stat(target.stderr).st_size
        descriptor = os.pidfd_open(target.pid)
    except (OSError, ValueError):
        return []
    try:
        signal.pidfd_send_signal(descriptor, STACK_SIGNAL)
    except OSError:
        return []
    finally:
        os.close(descriptor)
    deadline = time.monotonic() + _HANDLER_SECONDS
    text, size = "", -1
    while time.monotonic() < deadline:
        with open(target.stderr, "rb") as file:
            file.seek(begin)
            text = file.read(1 << 20).decode("utf-8", "replace")
        # The handler writes line by line and says nothing at the end: quiet means done.
        if text and len(text) == size:
            break
        size = len(text)
        await asyncio.sleep(0.05)
    return parse_faulthandler(text)


def parse_faulthandler(text: str) -> list[Stack]:
    """The threads in a dump of faulthandler."""
    threads: list[Stack] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head:
            is_current = head.group(1) == "Current thread"
            threads.append(
                {"name": head.group(2), "active": is_current, "owns_gil": False, "frames": []}
            )
            continue
        frame = _FRAME.match(line)
        if frame and threads:
            file, number, function = frame.groups()
            threads[-1]["frames"].append({"function": function, "file": file, "line": int(number)})
    return threads


def is_armed(pid: int) -> bool:
    """Whether the process catches the stack signal (SigCgt)."""
    caught = int(_status_field(pid, "SigCgt") or "0", 16)
    return bool(caught >> (STACK_SIGNAL - 1) & 1)


def process_state(pid: int) -> str:
    """The kernel's word for what a process does, as `S (sleeping)`."""
    return _status_field(pid, "State") or "gone"


def _status_field(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(name + ":"):
                    return line.split(":", 1)[1].strip()
    except (FileNotFoundError, ProcessLookupError):
        pass
    return ""


def _find_py_spy() -> str | None:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
