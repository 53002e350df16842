"""Who lives on this machine: /proc, read once, and which of them belong to a mark or a session.

Used by the `scan` containment and by sweeps after a keeper's death. It only reports; signals are sent by pidfd, and only
to a process whose start time is still the one that was seen.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MARK_BYTES = 120
_ENVIRON_BYTES = 4 << 20
_EXEC_SECONDS = 0.2
_PAUSE_SECONDS = 0.0005
_KERNEL_THREAD = 0x00200000


@dataclass(frozen=True)
class Seen:
    """One process at one moment."""

    pid: int
    parent: int
    session: int
    start: int
    state: str
    is_kernels: bool = False
    """A thread of the kernel, which has no memory of its own."""

    @property
    def key(self) -> tuple[int, int]:
        """What no other process has."""
        return self.pid, self.start

    @property
    def age_seconds(self) -> float:
        """Since it was started."""
        ticks = os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start / ticks

    @property
    def is_alive(self) -> bool:
        """Not a zombie and not being torn down."""
        return self.state not in "ZXx"


def cluster_key(directory: str) -> str:
    """Short name of a cluster directory: in marks and cgroup names."""
    return digest(os.path.realpath(directory))


def digest(text: str) -> str:
    """64-bit FNV-1a in hex: hashlib would map all of OpenSSL into every fork of the keeper."""
    value = 0xCBF29CE484222325
    for byte in os.fsencode(text):
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def safe_name(text: str) -> str:
    """A file name for any text, the text itself where it can be; different texts get different names."""
    clean = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in text)
    if clean == text and text and not text.startswith(".") and len(text) <= 200:
        return text
    return f"_{clean[:150]}-{digest(text)}"


def make_mark(cluster: str, keeper: str, attempt: str) -> str:
    """The value of ARGOSY_MARK: always the same length, so that a forked process can overwrite it in place."""
    mark = f"{cluster}.{keeper}.{attempt}"
    if len(mark) > MARK_BYTES - 1 or not mark.isascii():
        mark = f"{cluster}.{keeper}.{digest(attempt)}"
    return (mark + ".").ljust(MARK_BYTES, ".")


def read_once(path: str, most_bytes: int) -> bytes:
    """One read of a small file that the kernel makes: a third of the system calls of open()."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, most_bytes)
    finally:
        os.close(fd)


def look_at(pid: int) -> Seen | None:
    """One process, or None when there is none."""
    try:
        text = read_once(f"/proc/{pid}/stat", 2048)
    except OSError:
        return None
    # The command's name may hold spaces and parentheses; the fields begin after the last one.
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Seen(
        pid=pid,
        state=chr(fields[0][0]),
        parent=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
        is_kernels=bool(int(fields[6]) & _KERNEL_THREAD),
    )


def look_at_all() -> dict[int, Seen]:
    """Every process of this pid namespace."""
    seen = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = look_at(int(name))
            if process is not None:
                seen[process.pid] = process
    return seen


def is_same_alive(pid: int, start: int) -> bool:
    """The process seen earlier is still there and no zombie."""
    now = look_at(pid)
    return now is not None and now.start == start and now.is_alive


def marks_of(
    everybody: dict[int, Seen], bare: set[tuple[int, int]] | None = None
) -> dict[int, str]:
    """The ARGOSY_MARK of each; nothing when it has none or may not be read.

    A process that is just becoming another program has no environment for a moment: it is asked again, for a while. `bare` keeps those that have none, by pid and start, from one call to the next.
    """
    bare = set() if bare is None else bare
    marks: dict[int, str] = {}
    unread = list(everybody.values())
    deadline = time.monotonic() + _EXEC_SECONDS
    while True:
        empty = []
        for process in unread:
            environ = _environ_of(process.pid)
            marks[process.pid] = _mark_in(environ or b"")
            is_odd = environ is not None and not environ and process.is_alive
            if is_odd and not process.is_kernels and process.key not in bare:
                empty.append(process)
        if not empty or time.monotonic() > deadline:
            break
        unread = empty
        time.sleep(_PAUSE_SECONDS)
    bare.intersection_update(one.key for one in everybody.values())
    bare.update(one.key for one in empty)
    return marks


def _environ_of(pid: int) -> bytes | None:
    """None when it may not be read, or the process has gone."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read(_ENVIRON_BYTES)
    except OSError:
        return None


def _mark_in(environ: bytes) -> str:
    for entry in environ.split(b"\0"):
        if entry.startswith(b"ARGOSY_MARK="):
            return entry[len(b"ARGOSY_MARK=") :].decode("ascii", "replace")
    return ""


class Census:
    """The processes of one moment, by what binds them together."""

    def __init__(
        self,
        find: Callable[[], dict[int, Seen]] | None = None,
        bare: set[tuple[int, int]] | None = None,
    ) -> None:
        """`find` looks at those that matter; by default all do. `bare` are known to have no environment."""
        self._bare = bare
        self.at = time.monotonic()
        self.everybody = (find or look_at_all)()
        self._children: dict[int, list[int]] = {}
        self._sessions: dict[int, list[int]] = {}
        self._marks: dict[str, list[int]] = {}
        for seen in self.everybody.values():
            self._children.setdefault(seen.parent, []).append(seen.pid)
            self._sessions.setdefault(seen.session, []).append(seen.pid)

    def of_session(self, session: int) -> list[int]:
        """Members of a session."""
        return self._sessions.get(session, [])

    def of_mark(self, mark: str) -> list[int]:
        """Processes with this mark; all are asked for theirs by the first question."""
        if not self._marks:
            for pid, own in marks_of(self.everybody, self._bare).items():
                self._marks.setdefault(own, []).append(pid)
        return self._marks.get(mark, []) if mark else []

    def with_descendants(self, roots: Iterable[int]) -> set[int]:
        """The roots and all that descend from them."""
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting.extend(self._children.get(pid, ()))
        return found


class Lookout:
    """Looks at all processes once for everybody who asks in the same turn of a loop: thousands may end in one."""

    def __init__(self, find: Callable[[], dict[int, Seen]] | None = None) -> None:
        self._find = find
        self.turn_began: Callable[[], float] = time.monotonic
        """What was seen before this moment is not good enough; by default nothing is."""
        self._last: Census | None = None
        self._bare: set[tuple[int, int]] = set()

    def look(self) -> Census:
        """Who lives now, or did at the earliest when this turn began."""
        if self._last is None or self._last.at < self.turn_began():
            self._last = Census(self._find, self._bare)
        return self._last


def ancestors(pid: int, everybody: dict[int, Seen]) -> set[int]:
    """The process and those it descends from."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        process = everybody.get(pid)
        pid = process.parent if process is not None else 0
    return found


def kill_seen(process: Seen) -> bool:
    """SIGKILL to exactly the process that was seen; False when it is gone or may not be killed."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # With the pidfd held the number cannot be reused, so the start time decides.
        if not is_same_alive(process.pid, process.start):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def describe(pid: int) -> str:
    """`PID (command line)` for people; arguments only, never the environment."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        words = ""
    return f"{pid} ({words or '?'})"
