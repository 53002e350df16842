"""What the zygote asks of the kernel below Python: prctl, task counts, and the memory that /proc shows.

`/proc/PID/environ` and `/proc/PID/cmdline` show the memory written by exec, not `os.environ`: a forked rank overwrites its mark
and its command line there, in place. Called by the zygote before a fork (to find the places) and by the rank after it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_MADV_COLLAPSE = 25
_HUGE_BYTES = 2 << 20
_FAULTS = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
_MARK_NAME = b"ARGOSY_MARK="

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def wait_adopted(keeper: int, timeout_seconds: float = 10.0) -> bool:
    """Wait until the keeper is this process's parent and arm PDEATHSIG; False when that cannot be had any more."""
    deadline = time.monotonic() + timeout_seconds
    while os.getppid() != keeper:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0002)
    die_with_parent()
    # The keeper may have died between the check and the call; its death would then never be told.
    return os.getppid() == keeper


def allow_tracing_by(pid: int) -> None:
    """Let `pid` and its descendants trace this process where Yama restricts tracing; elsewhere nothing is needed."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def count_tasks() -> int:
    """Number of threads of this process, those unknown to Python included."""
    return len(os.listdir("/proc/self/task"))


def collapse_memory() -> int:
    """Gather this process's heap into huge pages, so that a fork copies 500 times fewer page entries; returns their number.

    A fork of a process with torch loaded becomes four times cheaper. Where the kernel does not offer it nothing changes.
    """
    count = 0
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        lines = file.readlines()
    for line in lines:
        fields = line.split(None, 5)
        if fields[1] != "rw-p" or (len(fields) == 6 and fields[5].strip() != "[heap]"):
            continue
        start, _, end = fields[0].partition("-")
        first = -(-int(start, 16) // _HUGE_BYTES) * _HUGE_BYTES
        for address in range(first, int(end, 16) - _HUGE_BYTES + 1, _HUGE_BYTES):
            arguments = (ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_BYTES), _MADV_COLLAPSE)
            count += _libc.madvise(*arguments) == 0
    return count


def find_touched_signals() -> tuple[int, ...]:
    """Signals to set anew in a child, because something is not as a fresh interpreter has it; empty when all is."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    # 32 and 33 belong to the C library; `make`, for one, leaves them ignored in all that it starts.
    settable = ~(_bit(32) | _bit(33))
    caught, ignored = int(fields["SigCgt"], 16) & settable, int(fields["SigIgn"], 16) & settable
    if faulthandler.is_enabled():  # by PYTHONFAULTHANDLER: the rank is to have it, too
        caught &= ~sum(_bit(number) for number in _FAULTS)
    is_fresh = (
        caught == _bit(signal.SIGINT)
        and ignored == _bit(signal.SIGPIPE) | _bit(signal.SIGXFSZ)
        and int(fields["SigBlk"], 16) == 0
    )
    if is_fresh and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return ()
    touched = [number for number in range(1, 65) if (caught | ignored) >> (number - 1) & 1]
    return tuple(touched) or (int(signal.SIGINT),)


def _bit(number: int) -> int:
    return 1 << (number - 1)


def flush_c_streams() -> None:
    """Flush C stdio: extension modules may have written there."""
    _libc.fflush(None)


@dataclass(frozen=True)
class ExecMemory:
    """Where exec put the command line and the environment of this process; zero rooms where /proc does not tell."""

    command_start: int = 0
    command_room: int = 0
    mark_start: int = 0
    mark_room: int = 0
    names: frozenset[str] = frozenset()
    """Names of the variables that were there at exec."""

    @classmethod
    def find(cls) -> ExecMemory:
        """Locate both regions through /proc/self/stat."""
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        # proc(5): arg_start, arg_end, env_start, env_end are fields 48 to 51, counted from 1; `fields` begins with the third.
        command_start, command_end, start, end = (int(field) for field in fields[45:49])
        if not (command_start and start):
            return cls()
        region = ctypes.string_at(start, end - start)
        mark = b"\0" + region
        found = mark.find(b"\0" + _MARK_NAME)
        mark_start = mark_room = 0
        if found >= 0:
            begin = found + len(_MARK_NAME)
            mark_start = start + begin
            mark_room = region.index(b"\0", begin) - begin
        names = frozenset(os.fsdecode(item.partition(b"=")[0]) for item in region.split(b"\0"))
        return cls(command_start, command_end - command_start, mark_start, mark_room, names)

    def write_mark(self, mark: str) -> None:
        """Show this mark in /proc/PID/environ; the rest of the room becomes NUL, so the value reads exactly."""
        data = os.fsencode(mark)
        if len(data) > self.mark_room:
            raise ValueError(f"a mark of {len(data)} bytes does not fit into {self.mark_room}")
        ctypes.memmove(self.mark_start, data.ljust(self.mark_room, b"\0"), self.mark_room)

    def write_command_line(self, arguments: list[str]) -> None:
        """Show these arguments in /proc/PID/cmdline, cut to the room that exec gave."""
        if self.command_room < 2:
            return
        data = b"\0".join(os.fsencode(argument) for argument in arguments)
        # A last byte that is not NUL would make the kernel read on into the environment.
        data = data[: self.command_room - 1].ljust(self.command_room, b"\0")
        ctypes.memmove(self.command_start, data, self.command_room)
