"""Warm parents: python processes with imports done, from which ranks are forked into the keeper's care.

Keyed by interpreter, preloads and load-time environment. A request waits for one that is importing; one that failed,
refuses or died sends the batch to exec, with the reason. Idle ones expire. The wire: docs/reference/keeper-protocol.md.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argosy.control.keeper.attempts import close_fd
from argosy.control.keeper.children import Errand, end_child, open_child, read_report, start_child
from argosy.control.keeper.containment import Group
from argosy.control.keeper.frames import MOST_AGENT_BYTES, Connection, Message
from argosy.control.keeper.kernel import send_signal
from argosy.control.keeper.loop import READ, Timer, log
from argosy.control.keeper.state import Keeper

RANK_OOM_SCORE = 300
IDLE_SECONDS = 900.0
IMPORT_SECONDS = 300.0
FORK_SECONDS = 60.0
FAILED_SECONDS = 30.0
_MOST_ENTRIES = 4

Forked = Callable[[list[int] | None, str], None]
"""Called with the pids, or with None and the reason why there are none."""


@dataclass
class Zygote:
    """One warm parent."""

    entry: Entry
    layer: int
    pid: int
    pidfd: int
    connection: Connection
    group: Group | None
    report: int = -1
    is_ready: bool = False
    seconds: float = 0.0
    threads: int = 0
    forks: dict[int, tuple[Forked, Timer]] = field(default_factory=dict)
    timer: Timer | None = None


@dataclass
class Entry:
    """All layers of one key."""

    key: str
    spec: dict[str, Any]
    signature: tuple[Any, ...]
    sources: dict[str, int] = field(default_factory=dict)
    """Files that were imported from elsewhere than beside the interpreter, with their times."""
    zygotes: list[Zygote] = field(default_factory=list)
    waiting: list[Callable[[Zygote | None, str], None]] = field(default_factory=list)
    failure: str = ""
    failed_at: float = 0.0
    last_used: float = 0.0

    def usable(self) -> Zygote | None:
        """The ready one with the most imported."""
        ready = [zygote for zygote in self.zygotes if zygote.is_ready]
        return max(ready, key=lambda zygote: zygote.layer, default=None)

    def has_changed(self, signature: tuple[Any, ...]) -> bool:
        """Packages were installed, or a file that was imported is another one by now."""
        return self.signature != signature or any(
            _modified_at(path) != at for path, at in self.sources.items()
        )


class SpecError(Exception):
    """The description of a zygote makes no sense; names the field."""


class Zygotes:
    """The pool."""

    def __init__(self, keeper: Keeper, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self.keeper = keeper
        self.idle_seconds = idle_seconds
        self.on_settled: Callable[[], None] = lambda: None
        """Called when no fork is pending any more: orphans may be reaped again."""
        self._entries: dict[str, Entry] = {}
        self._next_fork = 0
        self._next_mark = 0

    def request(
        self, spec: Any, then: Callable[[Zygote | None, str], None], *, may_be_old: bool = False
    ) -> None:
        """Call back with a usable zygote, now or when it has imported; or with None and the reason."""
        entry = self.warm(spec, may_be_old=may_be_old)
        entry.last_used = time.monotonic()
        zygote = entry.usable()
        if zygote is not None:
            then(zygote, "")
        elif entry.zygotes:
            entry.waiting.append(then)
        else:
            then(None, entry.failure)

    def warm(self, spec: Any, *, may_be_old: bool = False) -> Entry:
        """Make sure that a zygote of this key exists, is importing, or has failed a moment ago; of the files as they are, unless it may be old."""
        spec = check_spec(spec)
        key = json.dumps(spec, sort_keys=True)
        entry = self._entries.get(key)
        signature = _signature(spec["python"])
        is_outdated = entry is not None and not may_be_old and entry.has_changed(signature)
        if entry is not None and is_outdated and not self._is_busy(entry):
            log(f"packages of {spec['python']} have changed: its zygote is made anew")
            self._retire(entry)
            entry = None
        if entry is None:
            self._make_room()
            entry = self._entries[key] = Entry(key, spec, signature)
            entry.last_used = time.monotonic()
            self._expire_later(entry, self.idle_seconds)
        is_due = time.monotonic() - entry.failed_at > FAILED_SECONDS
        if not entry.zygotes and (not entry.failure or is_due):
            entry.failure = ""
            self._start(entry)
        return entry

    def fork(
        self, zygote: Zygote, attempts: list[Message], descriptors: list[int], then: Forked
    ) -> None:
        """Send one batch; `then` is called exactly once."""
        self._next_fork += 1
        number = self._next_fork
        timer = self.keeper.loop.after(FORK_SECONDS, lambda: self._hung(zygote))
        zygote.forks[number] = (then, timer)
        frame = {
            "type": "fork",
            "id": number,
            "keeper": self.keeper.pid,
            "attempts": attempts,
            "fds": len(descriptors),
        }
        zygote.connection.send(frame, descriptors)

    def has_pending(self) -> bool:
        """Some batch may have processes whose pids are not known yet."""
        return any(z.forks for entry in self._entries.values() for z in entry.zygotes)

    def owns(self, pid: int) -> bool:
        """Whether the child is a zygote."""
        return any(z.pid == pid for entry in self._entries.values() for z in entry.zygotes)

    def listing(self) -> list[dict[str, Any]]:
        """For `list` and `statistics`."""
        return [
            {
                "python": entry.spec["python"],
                "preload": entry.spec["preload"],
                "failure": entry.failure,
                "waiting": len(entry.waiting),
                "layers": [
                    {"layer": z.layer, "pid": z.pid, "ready": z.is_ready, "seconds": z.seconds}
                    for z in entry.zygotes
                ],
            }
            for entry in self._entries.values()
        ]

    def end_all(self) -> None:
        """Kill every zygote; ranks forked from them live on."""
        for entry in list(self._entries.values()):
            self._retire(entry)

    # --- life of a zygote ---------------------------------------------------------------------

    def _start(self, entry: Entry) -> None:
        try:
            self._start_first(entry)
        except OSError as error:
            self._fail(entry, f"the warm parent could not be started: {error.strerror}")

    def _start_first(self, entry: Entry) -> None:
        """Raises OSError, and then nothing is left of it."""
        ours, theirs = socket.socketpair()
        report, group = -1, None
        try:
            with theirs:
                group = self._make_group()
                pid, report = self._fork_first(entry, theirs, group)
            zygote = self._add(entry, 1, pid, ours)
        except OSError:
            ours.close()
            close_fd(report)
            self._remove_group(group)
            raise
        zygote.group, zygote.report = group, report
        self._expect_ready(zygote)
        modules = entry.spec["preload"]
        zygote.connection.send({"type": "preload", "modules": modules, "layer": 1})

    def _make_group(self) -> Group:
        self._next_mark += 1
        name = f"zygote-{self._next_mark}"
        return self.keeper.containment.make_group(name, self.keeper.mark(name))

    def _fork_first(self, entry: Entry, theirs: socket.socket, group: Group) -> tuple[int, int]:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
            errand = Errand(
                argv=[entry.spec["python"], "-m", "argosy.control.zygote", "--socket", "3"],
                env={**env, **entry.spec["env"], "ARGOSY_MARK": group.mark},
                limits={"nofile": self.keeper.before.open_files},
                affinity=self.keeper.before.affinity,
                # As urgent as the keeper: somebody waits for every fork. Ranks set their own level.
                nice=os.getpriority(os.PRIO_PROCESS, 0),
                oom_score=RANK_OOM_SCORE,
                descriptors=[null, 2, 2, theirs.fileno()],
                entries=[group.entry] if group.entry else [],
            )
            pid, report = start_child(errand)
        finally:
            os.close(null)
        group.leader = pid
        return pid, report

    def _expect_ready(self, zygote: Zygote) -> None:
        zygote.timer = self.keeper.loop.after(IMPORT_SECONDS, lambda: self._hung(zygote))

    def _add(self, entry: Entry, layer: int, pid: int, sock: socket.socket) -> Zygote:
        """Watch over it; when that cannot be done it is ended, and OSError raised."""
        pidfd = open_child(pid)
        try:
            self.keeper.loop.watch(pidfd, READ, lambda mask: self._died(zygote))
            connection = Connection(
                self.keeper.loop,
                sock,
                on_frame=lambda c, message, fds: self._received(zygote, message, fds),
                on_close=lambda c: self._hung_up(zygote),
                most_bytes=MOST_AGENT_BYTES,
                most_queued_bytes=8 * MOST_AGENT_BYTES,
            )
        except OSError:
            self.keeper.loop.forget(pidfd)
            os.close(pidfd)
            end_child(pid)
            raise
        zygote = Zygote(entry, layer, pid, pidfd, connection, None)
        entry.zygotes.append(zygote)
        return zygote

    def _received(self, zygote: Zygote, message: Message, descriptors: list[int]) -> None:
        kind = message.get("type")
        if kind == "ready":
            self._ready(zygote, message)
        elif kind == "failed":
            reason = f"{message.get('module')}: {message.get('error')}"
            if zygote.layer == 1:
                self._fail(zygote.entry, f"the warm parent could not import {reason}")
            log(f"zygote {zygote.pid} could not import {reason}")
            self._end(zygote)
        elif kind == "layer" and len(descriptors) == 1:
            self._grow(zygote, message, socket.socket(fileno=descriptors.pop()))
        elif kind in ("forked", "refused"):
            self._answered(zygote, message)
        for fd in descriptors:
            os.close(fd)

    def _ready(self, zygote: Zygote, message: Message) -> None:
        if zygote.timer is not None:
            zygote.timer.cancel()
        zygote.report = close_fd(zygote.report)
        zygote.is_ready = True
        zygote.seconds = float(message.get("seconds", 0.0))
        zygote.threads = int(message.get("threads", 0))
        for path, at in dict(message.get("sources") or {}).items():
            zygote.entry.sources.setdefault(path, at)  # a layer above has the same modules
        waiting, zygote.entry.waiting = zygote.entry.waiting, []
        for then in waiting:
            then(zygote, "")

    def _grow(self, below: Zygote, message: Message, sock: socket.socket) -> None:
        pid = int(message["pid"])
        try:
            zygote = self._add(below.entry, int(message.get("layer", 2)), pid, sock)
        except OSError as error:
            log(f"zygote {pid} cannot be kept: {error.strerror}")
            sock.close()
            return
        try:
            # Its own group: the end of the layer below must not take it along.
            zygote.group = self._make_group()
            zygote.group.add(pid)
        except OSError as error:
            log(f"zygote {pid} stays in the group of the layer below: {error.strerror}")
            self._remove_group(zygote.group)
            zygote.group = None

    def _answered(self, zygote: Zygote, message: Message) -> None:
        pending = zygote.forks.pop(message.get("id", 0), None)
        if pending is None:
            return
        then, timer = pending
        timer.cancel()
        if message["type"] == "forked":
            then([int(pid) for pid in message.get("pids", [])], "")
        else:
            then(None, f"a warm fork was refused: {message.get('reason')}")
        if not self.has_pending():
            self.on_settled()

    def _hung(self, zygote: Zygote) -> None:
        log(f"zygote {zygote.pid} does not answer and is killed")
        self._end(zygote)

    def _hung_up(self, zygote: Zygote) -> None:
        self._end(zygote)

    def _end(self, zygote: Zygote) -> None:
        """Kill it; `_died` does the rest."""
        if zygote.pidfd >= 0:
            send_signal(zygote.pidfd, 9)

    def _died(self, zygote: Zygote) -> None:
        # It may have answered with its last breath: pids it reported are ranks that live.
        zygote.connection.drain()
        self.keeper.loop.forget(zygote.pidfd)
        entry = zygote.entry
        if zygote in entry.zygotes:
            entry.zygotes.remove(zygote)
        status = ""
        try:
            info = os.waitid(os.P_PIDFD, zygote.pidfd, os.WEXITED | os.WNOHANG)
            if info is not None:
                word = "code" if info.si_code == os.CLD_EXITED else "signal"
                status = f" ({word} {info.si_status})"
        except ChildProcessError:
            pass
        zygote.pidfd = close_fd(zygote.pidfd)
        zygote.connection.close()
        if zygote.timer is not None:
            zygote.timer.cancel()
        reason = self._last_words(zygote) or f"the warm parent died{status}"
        if not zygote.is_ready and status == " (code 1)":
            # Its own failures it tells; Python's, that there is no such module, are in the keeper's log.
            reason += f"; is argosy installed in {entry.spec['python']}? keeper.log says more"
        log(f"zygote {zygote.pid} ended{status}")
        forks, zygote.forks = zygote.forks, {}
        for then, timer in forks.values():
            timer.cancel()
            then(None, reason)
        self._remove_group(zygote.group)
        if not entry.zygotes and not zygote.is_ready:
            self._fail(entry, entry.failure or reason)
        elif not entry.zygotes and entry.waiting:
            self._start(entry)
        self.on_settled()

    def _remove_group(self, group: Group | None, tries: int = 20) -> None:
        if group is None or group.method == "scan":
            return
        group.kill()
        if not group.remove() and tries:
            self.keeper.loop.after(0.05, lambda: self._remove_group(group, tries - 1))

    @staticmethod
    def _last_words(zygote: Zygote) -> str:
        if zygote.report < 0:
            return ""
        try:
            text = os.read(zygote.report, 65536)
        except BlockingIOError:
            text = b""
        zygote.report = close_fd(zygote.report)
        _, error = read_report(text)
        return f"the warm parent could not be started: {error}" if error else ""

    def _fail(self, entry: Entry, reason: str) -> None:
        entry.failure = reason
        entry.failed_at = time.monotonic()
        waiting, entry.waiting = entry.waiting, []
        for then in waiting:
            then(None, reason)

    # --- expiry -------------------------------------------------------------------------------

    @staticmethod
    def _is_busy(entry: Entry) -> bool:
        return bool(entry.waiting) or any(zygote.forks for zygote in entry.zygotes)

    def _make_room(self) -> None:
        idle = [entry for entry in self._entries.values() if not self._is_busy(entry)]
        if len(self._entries) >= _MOST_ENTRIES and idle:
            self._retire(min(idle, key=lambda entry: entry.last_used))

    def _retire(self, entry: Entry) -> None:
        self._entries.pop(entry.key, None)
        for zygote in list(entry.zygotes):
            self._end(zygote)

    def _expire_later(self, entry: Entry, seconds: float) -> None:
        self.keeper.loop.after(seconds, lambda: self._expire(entry))

    def _expire(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is not entry:
            return
        left = entry.last_used + self.idle_seconds - time.monotonic()
        if left > 0 or self._is_busy(entry):
            self._expire_later(entry, max(left, 1.0))
        else:
            log(f"an idle zygote of {entry.spec['python']} expires")
            self._retire(entry)

    # --- upgrade ------------------------------------------------------------------------------

    def to_state(self) -> list[dict[str, Any]]:
        """For a successor program; no fork may be pending."""
        return [
            {
                "spec": zygote.entry.spec,
                "sources": zygote.entry.sources,
                "layer": zygote.layer,
                "pid": zygote.pid,
                "is_ready": zygote.is_ready,
                "seconds": zygote.seconds,
                "group": zygote.group.path if zygote.group is not None else "",
                "connection": zygote.connection.to_state(),
            }
            for entry in self._entries.values()
            for zygote in entry.zygotes
        ]

    def take_state(self, state: list[dict[str, Any]], next_mark: int) -> None:
        """Go on with the predecessor's zygotes."""
        self._next_mark = next_mark
        for saved in state:
            spec = saved["spec"]
            key = json.dumps(spec, sort_keys=True)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = Entry(key, spec, _signature(spec["python"]))
                entry.last_used = time.monotonic()
                self._expire_later(entry, self.idle_seconds)
            entry.sources.update(saved.get("sources") or {})
            sock = socket.socket(fileno=saved["connection"]["fd"])
            zygote = self._add(entry, saved["layer"], saved["pid"], sock)
            zygote.is_ready, zygote.seconds = saved["is_ready"], saved["seconds"]
            if saved["group"]:
                zygote.group = self.keeper.containment.group_at(saved["group"], "")
            if not zygote.is_ready:
                self._expect_ready(zygote)
            zygote.connection.take_state(saved["connection"])

    @property
    def next_mark(self) -> int:
        """Counter of marks given, for a successor."""
        return self._next_mark


def check_spec(spec: Any) -> dict[str, Any]:
    """The description in its one form; raises SpecError."""
    if not isinstance(spec, dict) or not isinstance(spec.get("python"), str) or not spec["python"]:
        raise SpecError("zygote.python is missing")
    preload = spec.get("preload") or []
    env = spec.get("env") or {}
    if not isinstance(preload, list) or not all(isinstance(name, str) for name in preload):
        raise SpecError("zygote.preload is not a list of modules")
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise SpecError("zygote.env is not an object of text")
    return {"python": spec["python"], "preload": preload, "env": env}


def _modified_at(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return -1


def _signature(python: str) -> tuple[Any, ...]:
    """Changes when packages are installed or removed beside the interpreter."""
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    found = []
    for path in sorted(glob.glob(f"{prefix}/lib/python3*/*-packages")):
        try:
            found.append((path, os.stat(path).st_mtime_ns))
        except OSError:
            continue
    return tuple(found)
