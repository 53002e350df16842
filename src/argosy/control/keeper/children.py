"""Forking a child and turning it into a program: everything between fork and exec.

The keeper forks only here, from its main thread. The child joins its cgroups, gets its session, limits, descriptors and
signals, and tells over a report descriptor what went wrong; it never returns into the keeper's loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import resource
import signal
import termios
from dataclasses import dataclass, field

from argosy.control.keeper.kernel import (
    set_death_signal,
    set_name,
    set_oom_score,
    set_priority,
)

_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_MOST_GATE_BYTES = 4 << 20


@dataclass
class Errand:
    """All that a child needs; made before the fork, so that the child only carries out."""

    argv: list[str]
    env: dict[str, str]
    cwd: str = "/"
    umask: int = 0o022
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    affinity: list[int] = field(default_factory=list)
    nice: int = 0
    oom_score: int | None = None
    descriptors: list[int] = field(default_factory=list)
    """become 0, 1, 2, 3, … in the child; everything else is closed"""
    entries: list[str] = field(default_factory=list)
    """cgroup.procs files to join"""
    has_terminal: bool = False
    """descriptor 0 becomes the controlling terminal"""
    dies_with_keeper: bool = True
    gate: int = -1
    """read end to wait at before exec"""


class StartFailure(Exception):
    """The child could not become the program; the text is for people."""


def start_child(errand: Errand) -> tuple[int, int]:
    """Fork and exec; (pid, read end of the report). The report ends when the program runs."""
    report_read, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    keeper = os.getpid()
    changed = _changed_signals()
    # Only these could run the keeper's handlers in the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, changed)
    try:
        pid = os.fork()
        if pid == 0:
            _be_child(errand, report_write, keeper)
    except OSError:
        os.close(report_read)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, changed)
        os.close(report_write)
    return pid, report_read


def open_child(pid: int) -> int:
    """The pidfd of a new child; without one its end would never be noticed, so it is ended now. Raises OSError."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        end_child(pid)
        raise


def end_child(pid: int) -> None:
    """Kill and reap a child that cannot be kept; it is not reaped yet, so the number is its own."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def read_report(text: bytes) -> tuple[list[str], str]:
    """(notes, error) of what a child said."""
    notes: list[str] = []
    error = ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if "error" in said:
                error = str(said["error"])
            else:
                notes.append(str(said["note"]))
    return notes, error


def _be_child(errand: Errand, report: int, keeper: int) -> None:
    """Never returns."""
    code = 127
    try:
        try:
            report, gate = _arrange_descriptors(errand, report)
            os.setsid()
            if errand.dies_with_keeper:
                set_death_signal(signal.SIGKILL)
                if os.getppid() != keeper:
                    os._exit(code)
            _join_groups(errand)
            if errand.has_terminal:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            _set_attributes(errand, report)
            _reset_signals()
            if gate >= 0:
                set_name("argosy-parked")
                errand.env.update(_wait_at_gate(gate))
            _become(errand.argv, errand.env)
        except StartFailure as failure:
            _say(report, error=str(failure))
        except OSError as failure:
            _say(report, error=f"could not be started: {failure}")
    except BaseException as failure:  # noqa: BLE001 - entry point of the child; it must not return
        _say(report, error=f"could not be started: {failure!r}")
    finally:
        os._exit(code)


def _arrange_descriptors(errand: Errand, report: int) -> tuple[int, int]:
    """Targets 0, 1, 2, …; then report and gate, close-on-exec; nothing above."""
    count = len(errand.descriptors)
    wanted = [*errand.descriptors, report] + ([errand.gate] if errand.gate >= 0 else [])
    # First out of the way of every target, so that no dup2 overwrites a source.
    floor = len(wanted) + 3
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in wanted]
    for target, source in enumerate(moved):
        os.dup2(source, target, inheritable=target < count)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(len(wanted), most if most > 0 else 1 << 20)
    return count, count + 1 if errand.gate >= 0 else -1


def _join_groups(errand: Errand) -> None:
    for entry in errand.entries:
        try:
            fd = os.open(entry, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"0")
            finally:
                os.close(fd)
        except OSError as error:
            raise StartFailure(f"its cgroup cannot be joined: {entry}: {error.strerror}") from None


def _set_attributes(errand: Errand, report: int) -> None:
    if errand.oom_score is not None:
        set_oom_score(errand.oom_score)
    # A cluster that was started at a higher level than 0 cannot come back from it, and nobody asked for that.
    if not set_priority(errand.nice) and errand.nice:
        _say(report, note=f"nice level {errand.nice} is not allowed here")
    if errand.affinity:
        try:
            os.sched_setaffinity(0, errand.affinity)
        except OSError as error:
            _say(report, note=f"CPUs {errand.affinity} cannot be used: {error.strerror}")
    for name, limit in errand.limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), limit)
        except (OSError, ValueError) as error:
            _say(report, note=f"limit {name} = {limit[0]}, {limit[1]}: {error}")
    os.umask(errand.umask)
    try:
        os.chdir(errand.cwd)
    except OSError as error:
        raise StartFailure(f"working directory {errand.cwd}: {error.strerror}") from None


@functools.cache
def _changed_signals() -> tuple[int, ...]:
    """Signals that the keeper ignores or catches; fixed once its loop runs."""
    fixed = (signal.SIGKILL, signal.SIGSTOP)
    return tuple(
        int(number)
        for number in signal.valid_signals()
        if number not in fixed and signal.getsignal(number) is not signal.SIG_DFL
    )


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in _changed_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _wait_at_gate(gate: int) -> dict[str, str]:
    """Block until the keeper opens the gate; its end without a word means exit at once."""
    text = b""
    while len(text) < _MOST_GATE_BYTES:
        part = os.read(gate, 65536)
        if not part:
            break
        text += part
    if not text.startswith(b"g"):
        os._exit(0)
    added = json.loads(text[1:] or b"{}").get("env", {})
    return {str(name): str(value) for name, value in added.items()}


def _become(argv: list[str], env: dict[str, str]) -> None:
    name = argv[0]
    if "/" in name:
        paths = [name]
    else:
        directories = env.get("PATH", _DEFAULT_PATH).split(":")
        paths = [f"{directory or '.'}/{name}" for directory in directories]
    refused = ""
    for path in paths:
        try:
            os.execve(path, argv, env)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR) and not os.path.exists(path):
                continue
            refused = refused or _why_not(path, error)
    if refused:
        raise StartFailure(refused)
    raise StartFailure(f"no such file: {name}" if "/" in name else f"command not found: {name}")


def _why_not(path: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"{path} names an interpreter that does not exist"
    if os.path.isdir(path):
        return f"not executable: {path} is a directory"
    if error.errno == errno.EACCES:
        return f"not executable: {path} (permission denied)"
    if error.errno == errno.ENOEXEC:
        return f"not executable: {path} is no program and has no #! line"
    if error.errno == errno.E2BIG:
        return f"{path}: arguments and environment are too long"
    return f"{path}: {error.strerror}"


def _say(report: int, **said: str) -> None:
    with contextlib.suppress(OSError):
        os.write(report, json.dumps(said).encode() + b"\n")
