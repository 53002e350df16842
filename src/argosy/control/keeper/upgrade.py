"""Re-exec in place: a new program takes over the same process, children, descriptors and unacknowledged events.

First the new program is tried in a child; then the keeper waits until nothing is half done, writes its state into a memfd
and execs. Death signals do not fire, pidfds are opened anew, exits that happen meanwhile wait as zombies.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

from argosy.control.keeper.attempts import Attempt
from argosy.control.keeper.children import Errand, start_child
from argosy.control.keeper.containment import MemoryGroup
from argosy.control.keeper.frames import Connection, Message
from argosy.control.keeper.kernel import read_memfd
from argosy.control.keeper.links import Links
from argosy.control.keeper.loop import READ, log
from argosy.control.keeper.services import Services
from argosy.control.keeper.starts import Starts
from argosy.control.keeper.state import Keeper
from argosy.control.keeper.terminals import Terminal

_QUIET_SECONDS = 30.0
_PLAIN = [
    "attempt",
    "run",
    "role",
    "index",
    "generation",
    "rank",
    "places",
    "token",
    "is_helper",
    "host",
    "reform",
    "state",
    "how",
    "note",
    "pid",
    "start",
    "started_at",
    "owns_group",
    "gate",
    "report",
    "error",
    "stop_signal",
    "stop_grace",
    "number",
]


class Upgrade:
    """Carries one keeper over into its next program."""

    def __init__(
        self, keeper: Keeper, links: Links, starts: Starts, services: Services | None
    ) -> None:
        self.keeper = keeper
        self.links = links
        self.starts = starts
        self.services = services
        self.check_pid = 0
        self._until = 0.0

    def begin(self, refuse: Callable[[str], None]) -> None:
        """Try the new program; if it can be imported, exec it as soon as nothing is half done."""
        if self._until:
            return
        self._until = time.monotonic() + _QUIET_SECONDS
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        errand = Errand(
            argv=[sys.executable, "-m", "argosy.control.keeper", "--check"],
            env=dict(os.environ),
            descriptors=[null, 2, 2],
        )
        try:
            self.check_pid, report = start_child(errand)
        finally:
            os.close(null)
        os.close(report)
        pidfd = os.pidfd_open(self.check_pid)
        self.keeper.loop.watch(pidfd, READ, lambda mask: self._checked(pidfd))

    def _checked(self, pidfd: int) -> None:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        if info is None:
            return
        self.keeper.loop.forget(pidfd)
        os.close(pidfd)
        self.check_pid = 0
        if info.si_code != os.CLD_EXITED or info.si_status != 0:
            self._give_up("the new program cannot be imported; see keeper.log")
            return
        self._pause(True)
        self._when_quiet()

    def _pause(self, is_paused: bool) -> None:
        agent = self.keeper.agent
        if agent is not None:
            if is_paused:
                agent.pause()
            else:
                agent.resume()

    def _when_quiet(self) -> None:
        if not self._is_quiet():
            if time.monotonic() > self._until:
                self._give_up(f"something was half done for {_QUIET_SECONDS:.0f} s")
            else:
                self.keeper.loop.after(0.01, self._when_quiet)
            return
        state = self._to_state()
        if state is None:
            # Descriptors are on their way to a peer: they arrive in a moment.
            self.keeper.loop.after(0.01, self._when_quiet)
            return
        self._exec(state)

    def _is_quiet(self) -> bool:
        zygotes = self.starts.zygotes
        if zygotes.has_pending() or any(entry["waiting"] for entry in zygotes.listing()):
            return False
        return all(
            attempt.state in ("running", "parked", "exited")
            for attempt in self.keeper.attempts.values()
        )

    def _give_up(self, why: str) -> None:
        self._until = 0.0
        self._pause(False)
        self.keeper.outbox.note(f"the keeper goes on with the old program: {why}")

    def _exec(self, state: Message) -> None:
        fd = os.memfd_create("argosy:upgrade", os.MFD_CLOEXEC)
        data = memoryview(json.dumps(state).encode())
        while data:
            data = data[os.write(fd, data) :]
        kept = _descriptors_in(state) | {fd}
        for number in kept:
            os.set_inheritable(number, True)
        log(f"re-exec with {len(kept)} descriptors and {len(state['attempts'])} attempts")
        command = [sys.executable, "-m", "argosy.control.keeper", "--resume", str(fd)]
        signal.set_wakeup_fd(-1)
        try:
            os.execv(sys.executable, command)
        except OSError as error:
            for number in kept:
                os.set_inheritable(number, False)
            os.close(fd)
            self._give_up(f"{sys.executable}: {error.strerror}")

    def _to_state(self) -> Message | None:
        keeper = self.keeper
        agent = keeper.agent.to_state() if keeper.agent is not None else None
        zygotes = self.starts.zygotes.to_state()
        if keeper.agent is not None and agent is None:
            return None
        if any(zygote["connection"] is None for zygote in zygotes):
            return None
        attempts = [_save_attempt(attempt) for attempt in keeper.attempts.values()]
        return {
            "fds_lock": keeper.lock,
            "id": keeper.id,
            "directory": keeper.directory,
            "runtime": keeper.runtime,
            "born": keeper.born,
            "containment": keeper.containment.to_state(),
            "before": vars(keeper.before),
            "listeners": {name: s.fileno() for name, s in keeper.listeners.items()},
            "outbox": keeper.outbox.to_state(),
            "arenas": keeper.arenas.to_state(),
            "blobs": keeper.blobs.to_state(),
            "ports": keeper.ports.to_state(),
            "stores": self.starts.stores.to_state(),
            "zygotes": zygotes,
            "idle_seconds": self.starts.zygotes.idle_seconds,
            "next_mark": self.starts.zygotes.next_mark,
            "services": self.services.to_state() if self.services is not None else None,
            "attempts": attempts,
            "ended": list(keeper.ended),
            "ends": keeper.ends.to_state(),
            "agent": agent,
        }


def _save_attempt(attempt: Attempt) -> Message:
    saved: Message = {name: getattr(attempt, name) for name in _PLAIN}
    saved["order"] = attempt.order
    saved["group"] = attempt.group.path if attempt.group is not None else None
    saved["known"] = list(attempt.group.known.items()) if attempt.group is not None else []
    saved["memory"] = vars(attempt.memory) if attempt.memory is not None else None
    saved["links"] = [link.to_state() for link in attempt.links]
    saved["stop_seconds"] = max(0.0, attempt.stop_due - time.monotonic())
    saved["terminal"] = None
    if attempt.terminal is not None:
        saved["terminal"] = attempt.terminal.to_state()
        saved["attached"] = [client.to_state() for client in attempt.terminal.clients]
    return saved


def read_state(fd: int) -> Message:
    """What the predecessor left; its descriptors become close-on-exec again."""
    state: Message = json.loads(read_memfd(fd))
    os.close(fd)
    for number in _descriptors_in(state):
        os.set_inheritable(number, False)
    return state


def take_attempts(keeper: Keeper, links: Links, starts: Starts, state: Message) -> None:
    """Go on with every attempt of the predecessor."""
    keeper.ended.update(dict.fromkeys(state["ended"]))
    keeper.ends.take_state(state.get("ends", []))
    for saved in state["attempts"]:
        attempt = Attempt(saved["order"], **{name: saved[name] for name in _PLAIN if name in saved})
        keeper.enter(attempt)
        if attempt.state == "exited":
            continue
        _take_one(keeper, links, starts, attempt, saved)


def _take_one(
    keeper: Keeper, links: Links, starts: Starts, attempt: Attempt, saved: Message
) -> None:
    if saved["group"] is not None:
        mark = keeper.mark(attempt.attempt)
        attempt.group = keeper.containment.group_at(saved["group"], mark)
        if attempt.owns_group:
            attempt.group.leader = attempt.pid
        attempt.group.known = {int(pid): int(start) for pid, start in saved["known"]}
    if saved["memory"] is not None:
        attempt.memory = MemoryGroup(**saved["memory"])
    if saved["terminal"] is not None:
        terminal = saved["terminal"]
        attempt.terminal = Terminal(
            keeper.loop,
            terminal["log"],
            lambda text: keeper.outbox.note(text, run=attempt.run, attempt=attempt.attempt),
            (terminal["master"], terminal["slave"]),
        )
    attempt.pidfd = os.pidfd_open(attempt.pid)
    starts.exits.watch(attempt)
    if attempt.report >= 0:
        keeper.loop.watch(attempt.report, READ, lambda mask: starts.read_report_of(attempt))
    for link in saved["links"]:
        if link is not None:
            connection = revive(keeper, link)
            links.adopt_worker(connection, attempt)
            connection.take_state(link)
    for client in saved.get("attached", []):
        if client is not None:
            connection = revive(keeper, client)
            links.adopt_attached(connection, attempt)
            connection.take_state(client)
    if attempt.stop_signal:
        number, attempt.stop_signal = attempt.stop_signal, 0
        starts.exits.resume_stop(attempt, number, saved["stop_seconds"])


def revive(keeper: Keeper, saved: Message) -> Connection:
    """A connection of the predecessor; its new owner sets the callbacks."""
    return Connection(
        keeper.loop,
        socket.socket(fileno=saved["fd"]),
        on_frame=lambda connection, message, fds: None,
        on_close=lambda connection: None,
    )


def _descriptors_in(state: Message) -> set[int]:
    """Every descriptor number in the state."""
    found = {state["fds_lock"], *state["listeners"].values(), *state["blobs"].values()}
    found |= {fd for held in state["ports"].values() for fd in held.values()}
    found |= {entry["fd"] for entry in (*state["arenas"], *state["stores"])}
    connections = [state["agent"], *(zygote["connection"] for zygote in state["zygotes"])]
    for saved in state["attempts"]:
        found |= {saved["gate"], saved["report"]}
        if saved["terminal"] is not None:
            found |= set(saved["terminal"].values())
        connections += saved["links"] + saved.get("attached", [])
    found |= {connection["fd"] for connection in connections if connection is not None}
    return {fd for fd in found if fd >= 0}
