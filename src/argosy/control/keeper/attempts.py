"""An attempt: one start of one process, as the keeper knows it.

Holds what was ordered (checked here, before anything is started) and what has become of it. State changes are made by
starts, stops and exits; this module only describes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from dataclasses import dataclass, field
from typing import Any

from argosy.control.keeper.containment import Group, MemoryGroup
from argosy.control.keeper.frames import Connection
from argosy.control.keeper.loop import Timer
from argosy.control.keeper.terminals import Terminal

PROGRAM_KINDS = {"exec": ("argv", list), "script": ("path", str), "module": ("name", str)}


class OrderError(Exception):
    """The order of an attempt cannot be carried out as it stands; names the field."""


@dataclass
class Attempt:
    """One start of one process."""

    order: dict[str, Any]
    attempt: str
    run: str
    role: str
    index: int
    generation: int = 0
    rank: int | None = None
    places: list[list[int]] = field(default_factory=list)
    """[generation, rank] that it had before, the newest last"""
    token: str = ""
    is_helper: bool = False
    """A store's host: the keeper's own errand, unknown to the agent."""
    host: str = ""
    """of a guest, a command beside a process: that process's attempt"""
    reform: dict[str, Any] | None = None
    """the newest generation that it was told"""

    state: str = "starting"
    """starting, running, parked, exiting, exited"""
    how: str = ""
    note: str = ""
    pid: int = 0
    pidfd: int = -1
    start: int = 0
    """start time in clock ticks: with the pid it names one process"""
    started_at: float = 0.0
    group: Group | None = None
    owns_group: bool = True
    memory: MemoryGroup | None = None
    terminal: Terminal | None = None
    gate: int = -1
    """write end; a parked process waits at the other one"""
    report: int = -1
    """read end of what an exec child says before it becomes the program"""
    report_text: bytes = b""
    error: str = ""
    has_failed_to_start: bool = False
    doom: int = 0
    """signal asked for before there was a process"""
    listener: socket.socket | None = None
    """a helper's listening socket until the zygote has it"""

    stop_signal: int = 0
    stop_due: float = 0.0
    stop_grace: float = 0.0
    """what it has from each sign that its save goes on; 0: its end is final"""
    stop_timer: Timer | None = None
    status: tuple[int | None, int | None] = (None, None)
    seen_at: float = 0.0
    killed: set[int] = field(default_factory=set)
    number: int = 0
    """of the exited event"""
    links: list[Connection] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        """Not known to have ended."""
        return self.state in ("starting", "running", "parked")

    @property
    def is_member(self) -> bool:
        """Its end concerns the others of its role."""
        return not self.is_helper and not self.is_guest

    @property
    def is_guest(self) -> bool:
        """It has the environment of another attempt's process, ends with it, and is no member of its gang."""
        return bool(self.host)

    @property
    def has_process(self) -> bool:
        """There is a pid that is not reaped yet."""
        return self.pidfd >= 0

    def listing(self) -> dict[str, Any]:
        """For `list`."""
        state = "running" if self.state == "exiting" else self.state
        return {
            "attempt": self.attempt,
            "run": self.run,
            "role": self.role,
            "index": self.index,
            "generation": self.generation,
            "rank": self.rank,
            "pid": self.pid,
            "state": state,
            "how": self.how,
            "note": self.note,
            "started_at": self.started_at,
            "is_joined": bool(self.links),
        }

    def record(self) -> dict[str, Any]:
        """For `attempts/<attempt>.json`."""
        return {
            "attempt": self.attempt,
            "run": self.run,
            "role": self.role,
            "index": self.index,
            "pid": self.pid,
            "start": self.start,
            "cgroup": self.group.path if self.group is not None else "",
        }


def make_attempt(order: Any) -> Attempt:
    """Check the order and make a fresh attempt of it; raises OrderError."""
    if not isinstance(order, dict):
        raise OrderError("an attempt is not an object")
    for name, kind in (("attempt", str), ("run", str), ("role", str), ("index", int)):
        if not isinstance(order.get(name), kind):
            raise OrderError(
                f"attempt {order.get('attempt')!r}: {name} is missing or no {kind.__name__}"
            )
    name = order["attempt"]
    if not name or len(name) > 200 or "\0" in name:
        raise OrderError(f"attempt id {name[:40]!r} has {len(name)} characters, not 1 to 200")
    _check_program(name, order)
    _check_fields(name, order)
    return Attempt(
        order=order,
        attempt=name,
        run=order["run"],
        role=order["role"],
        index=order["index"],
        generation=order.get("generation") or 0,
        rank=_rank_of(order.get("env", {})),
        token=str(order.get("token", "")),
        host=order.get("join") or "",
    )


def _check_program(name: str, order: dict[str, Any]) -> None:
    program = order.get("program")
    if not isinstance(program, dict) or program.get("kind") not in PROGRAM_KINDS:
        raise OrderError(f"attempt {name}: program.kind is not one of {', '.join(PROGRAM_KINDS)}")
    key, kind = PROGRAM_KINDS[program["kind"]]
    if not isinstance(program.get(key), kind) or not program[key]:
        raise OrderError(f"attempt {name}: program.{key} is missing or empty")
    words = program[key] if kind is list else [program[key], *program.get("args", [])]
    if not all(isinstance(word, str) and "\0" not in word for word in words):
        raise OrderError(f"attempt {name}: program has an argument that is not text without NUL")
    if kind is str and not isinstance(order.get("python"), str):
        raise OrderError(f"attempt {name}: python is missing")


_FIELDS: dict[str, tuple[type, ...]] = {
    "env": (dict,),
    "env_blob": (str,),
    "cwd": (str,),
    "umask": (int,),
    "limits": (dict,),
    "affinity": (list,),
    "stdout": (str,),
    "stderr": (str,),
    "tty": (bool,),
    "error_file": (str,),
    "threads": (int,),
    "nice": (int,),
    "memory_bytes": (int,),
    "secret_blobs": (dict,),
    "parked": (bool,),
    "join": (str,),
    "generation": (int,),
}


def _check_fields(name: str, order: dict[str, Any]) -> None:
    for key, kinds in _FIELDS.items():
        value = order.get(key)
        if value is not None and not isinstance(value, kinds):
            raise OrderError(f"attempt {name}: {key} is no {kinds[0].__name__}")
    for key, value in (order.get("env") or {}).items():
        if not isinstance(value, str) or not key or "=" in key or "\0" in key + value:
            raise OrderError(f"attempt {name}: env[{key[:40]!r}] cannot be an environment variable")
    for key, limit in (order.get("limits") or {}).items():
        if not hasattr(resource, f"RLIMIT_{key.upper()}"):
            raise OrderError(f"attempt {name}: limits[{key!r}] is unknown here")
        if not isinstance(limit, list | tuple) or [type(n) for n in limit] != [int, int]:
            raise OrderError(f"attempt {name}: limits[{key!r}] is not [soft, hard]")
    if not all(type(cpu) is int and cpu >= 0 for cpu in order.get("affinity") or []):
        raise OrderError(f"attempt {name}: affinity is not a list of CPU numbers")
    for key, blob in (order.get("secret_blobs") or {}).items():
        if not isinstance(blob, str) or not key.isidentifier():
            raise OrderError(f"attempt {name}: secret_blobs[{key[:40]!r}] is not NAME: blob")


def _rank_of(env: Any) -> int | None:
    text = env.get("RANK", "") if isinstance(env, dict) else ""
    return int(text) if text.isdigit() else None


def command_line(order: dict[str, Any]) -> list[str]:
    """The argv with which the program is started by exec."""
    program = order["program"]
    if program["kind"] == "exec":
        return list(program["argv"])
    args = list(program.get("args", []))
    if program["kind"] == "script":
        return [order["python"], program["path"], *args]
    return [order["python"], "-m", program["name"], *args]


def close_fd(fd: int) -> int:
    """Close if open; always -1, to be stored. A late write error of the file is nobody's to mend."""
    if fd >= 0:
        with contextlib.suppress(OSError):
            os.close(fd)
    return -1
