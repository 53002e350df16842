"""Entry of `python -m argosy.control.keeper`: takes the lock, sweeps, binds, starts the services, then serves.

It wires the parts together and never daemonises itself: whoever starts it does (`sweep.start_keeper`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from argosy.control.keeper.attempts import Attempt
from argosy.control.keeper.census import cluster_key
from argosy.control.keeper.containment import METHODS, Containment, find_containment
from argosy.control.keeper.exits import Exits
from argosy.control.keeper.frames import MOST_AGENT_BYTES, Connection, Message
from argosy.control.keeper.kernel import (
    become_subreaper,
    raise_open_files,
    read_memfd,
    set_oom_score,
    set_priority,
)
from argosy.control.keeper.links import Links
from argosy.control.keeper.loop import READ, Loop, log, log_exception
from argosy.control.keeper.outbox import Outbox
from argosy.control.keeper.ports import LOOPBACK, bind_port
from argosy.control.keeper.records import Records
from argosy.control.keeper.requests import Requests
from argosy.control.keeper.services import Services, end_survivors
from argosy.control.keeper.starts import Starts
from argosy.control.keeper.state import Before, Keeper
from argosy.control.keeper.stores import Stores
from argosy.control.keeper.sweep import living_keeper, sweep_leftovers, wait_for_lock
from argosy.control.keeper.upgrade import Upgrade, read_state, revive, take_attempts
from argosy.control.keeper.zygotes import IDLE_SECONDS, Zygotes

_NICE = -10
_OOM_SCORE = -500
_INHERIT_SECONDS = 10.0
_LOCK_HELD = 75


def main() -> int:
    """Run the keeper; its exit code."""
    options = _parse()
    if options.check:
        return 0
    os.umask(0o077)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    if options.resume is not None:
        return _resume(options.resume)
    directory, runtime = os.path.abspath(options.directory), os.path.abspath(options.runtime)
    try:
        Records(directory).make_directories()
        lock = wait_for_lock(directory, runtime)
    except OSError as error:
        print(f"keeper: {error}", file=sys.stderr)
        return 73
    if lock is None or living_keeper(directory):
        print(f"keeper: another keeper keeps {directory}", file=sys.stderr)
        _say_ready(options.ready_fd, b"held\n")
        return _LOCK_HELD
    return _begin(options, directory, runtime, lock)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m argosy.control.keeper")
    parser.add_argument("--directory", default="", help="the cluster's directory")
    parser.add_argument("--runtime", default="", help="directory of the sockets")
    parser.add_argument("--inherit", type=int, help="descriptor that gives a dead keeper's memfds")
    parser.add_argument("--warm-fd", type=int, help="a memfd: a zygote to start importing at once")
    parser.add_argument("--containment", default="auto", choices=["auto", *METHODS])
    parser.add_argument(
        "--idle-seconds", type=float, default=IDLE_SECONDS, help="unused zygotes end after this"
    )
    parser.add_argument("--no-services", action="store_true", help="neither agent nor controller")
    parser.add_argument("--ready-fd", type=int, help="gets `ready` when the sockets exist")
    parser.add_argument("--resume", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.check and options.resume is None and not (options.directory and options.runtime):
        parser.error("--directory and --runtime are required")
    return options


def _begin(options: argparse.Namespace, directory: str, runtime: str, lock: int) -> int:
    _close_others({0, 1, 2, lock, options.inherit, options.ready_fd, options.warm_fd})
    records = Records(directory)
    before_us = records.read_keeper()
    for what in sweep_leftovers(directory):
        log(f"swept {what}")
    keeper_id = os.urandom(6).hex()
    before = _raise_self()
    try:
        name = f"argosy-{cluster_key(directory)}-{keeper_id}"
        containment = find_containment(name, options.containment)
    except OSError as error:
        print(f"keeper: {error}", file=sys.stderr)
        return 71
    keeper = _make_keeper(keeper_id, directory, runtime, containment, before)
    keeper.lock = lock
    for old, number, event in records.read_exits():
        adopt_exit(keeper, old, number, event)
    keeper.listeners = _bind_all(runtime)
    parts = Parts(keeper, has_services=not options.no_services, idle_seconds=options.idle_seconds)
    keeper.write_record()
    reasons = f" ({'; '.join(containment.reasons)})" if containment.reasons else ""
    log(f"{keeper.id} pid {keeper.pid} keeps {directory} with {containment.method}{reasons}")
    _say_ready(options.ready_fd, b"ready\n")

    def serve() -> None:
        parts.links.listen()
        end_survivors(keeper, before_us.get("services") or {}, parts.start_services)

    if options.warm_fd is not None:
        warm = read_memfd(options.warm_fd)
        os.close(options.warm_fd)
        keeper.loop.soon(lambda: parts.warm(warm))
    if options.inherit is not None:
        receive_inheritance(keeper, options.inherit, serve)
    else:
        serve()
    gc.freeze()
    keeper.loop.run()
    return 0


def _resume(fd: int) -> int:
    state = read_state(fd)
    before = Before(**state["before"])
    before.open_files = (before.open_files[0], before.open_files[1])
    containment = Containment(**state["containment"])
    keeper = _make_keeper(state["id"], state["directory"], state["runtime"], containment, before)
    keeper.lock, keeper.born = state["fds_lock"], state["born"]
    keeper.listeners = {n: socket.socket(fileno=f) for n, f in state["listeners"].items()}
    keeper.outbox.take_state(state["outbox"])
    keeper.arenas.take_state(state["arenas"])
    keeper.blobs.take_state(state["blobs"])
    keeper.ports.take_state(state["ports"])
    parts = Parts(
        keeper, has_services=state["services"] is not None, idle_seconds=state["idle_seconds"]
    )
    parts.stores.take_state(state["stores"])
    parts.zygotes.take_state(state["zygotes"], state["next_mark"])
    take_attempts(keeper, parts.links, parts.starts, state)
    if state["agent"] is not None:
        connection = revive(keeper, state["agent"])
        parts.links.adopt_agent(connection, has_asked=True)
        connection.take_state(state["agent"])
    if parts.services is not None:
        parts.services.take_state(state["services"])
    parts.links.listen()
    keeper.loop.soon(parts.exits.reap_orphans)
    log(f"{keeper.id} goes on as a new program with {len(keeper.attempts)} attempts")
    keeper.loop.run()
    return 0


class Parts:
    """The keeper's parts, wired."""

    def __init__(self, keeper: Keeper, *, has_services: bool, idle_seconds: float) -> None:
        self.keeper = keeper
        self.exits = Exits(keeper)
        self.zygotes = Zygotes(keeper, idle_seconds=idle_seconds)
        self.stores = Stores(keeper, self.exits.kill)
        self.starts = Starts(keeper, self.exits, self.zygotes, self.stores)
        self.requests = Requests(keeper, self.exits, self.starts)
        self.links = Links(keeper, self.requests)
        self.services = Services(keeper) if has_services else None
        self.upgrade = Upgrade(keeper, self.links, self.starts, self.services)
        self._is_reviewing = self._has_new_ends = False
        self.exits.is_own = self._is_own
        self.exits.on_ended += [self.stores.member_ended, self._after_exit]
        self.zygotes.on_settled = self._reap
        self.requests.on_shutdown = self.shut_down
        self.requests.on_restart = self.upgrade.begin
        if self.services is not None:
            self.requests.service_statistics = self.services.statistics
        _watch_signals(
            keeper.loop,
            {
                signal.SIGCHLD: self._reap,
                signal.SIGTERM: self.shut_down,
                signal.SIGINT: self.shut_down,
            },
        )

    def start_services(self) -> None:
        """Agent and controller, if this keeper has any."""
        if self.services is not None and not self.keeper.is_ending:
            self.services.start_all()

    def warm(self, spec: bytes) -> None:
        """Start the zygote that whoever started the keeper will want first."""
        try:
            self.zygotes.warm(json.loads(spec))
        except ValueError as error:
            log(f"the zygote to warm is not JSON: {error}")

    def shut_down(self, grace_seconds: float = 2.0) -> None:
        """End every attempt, then zygotes and services, then the keeper."""
        if self.keeper.is_ending:
            return
        log("shuts down")
        self.keeper.is_ending = True
        for attempt in list(self.keeper.attempts.values()):
            if attempt.is_helper:
                self.exits.kill(attempt)
            else:
                self.exits.stop(attempt, signal.SIGTERM, grace_seconds)
        self._end_when_empty()

    def _end_when_empty(self) -> None:
        if any(attempt.state != "exited" for attempt in self.keeper.attempts.values()):
            return
        self.zygotes.end_all()
        if self.services is None:
            self._end()
        else:
            self.services.end_all(self._end)

    def _end(self) -> None:
        keeper = self.keeper
        for name in ("keeper", "control", "http"):
            with contextlib.suppress(OSError):
                os.unlink(f"{keeper.runtime}/{name}.sock")
        sweep_leftovers_of(keeper)
        keeper.outbox.tidy()
        keeper.records.remove_keeper()
        log("ends")
        keeper.loop.stop()

    def _after_exit(self, attempt: Attempt) -> None:
        if not attempt.is_helper:
            self._has_new_ends = True
        # Once for all that end in one wake: each of these looks at every process.
        if not self._is_reviewing:
            self._is_reviewing = True
            self.keeper.loop.soon(self._review)

    def _review(self) -> None:
        """After some ends: orphans, strangers, and whether all is over."""
        has_new_ends, self._has_new_ends = self._has_new_ends, False
        self._is_reviewing = False
        self._reap()
        is_scan = self.keeper.containment.method == "scan"
        if is_scan and has_new_ends and not self.zygotes.has_pending():
            self.exits.report_strangers()
        if self.keeper.is_ending:
            self._end_when_empty()

    def _reap(self) -> None:
        # A batch whose pids are not known yet may have a dead member: it must stay a zombie till then.
        if not self.zygotes.has_pending():
            self.exits.reap_orphans()

    def _is_own(self, pid: int) -> bool:
        if self.services is not None and self.services.owns(pid):
            return True
        return self.zygotes.owns(pid) or pid == self.upgrade.check_pid


def sweep_leftovers_of(keeper: Keeper) -> None:
    """At a clean end: zygotes were told to die; make sure, and remove the cgroups."""
    for what in sweep_leftovers(keeper.directory):
        log(f"swept {what}")
    keeper.containment.remove()


def adopt_exit(keeper: Keeper, old: str, number: int, event: dict[str, Any]) -> None:
    """An exit recorded by a dead keeper and never acknowledged becomes ours to report."""
    name = str(event["attempt"])
    if name in keeper.attempts:
        return
    attempt = Attempt({}, name, str(event.get("run", "")), "", 0)
    attempt.state = "exited"
    keeper.enter(attempt)
    keeper.outbox.adopt(old, number, event)


def receive_inheritance(keeper: Keeper, fd: int, then: Callable[[], None]) -> None:
    """Take over arenas and blobs; connects wait until the end mark, a hang-up or a deadline."""
    is_done = False

    def finish() -> None:
        nonlocal is_done
        if not is_done:
            is_done = True
            then()

    def received(connection: Connection, message: Message, descriptors: list[int]) -> None:
        if message.get("type") == "hold" and len(descriptors) == 1:
            owner = keeper.blobs if message.get("kind") == "blob" else keeper.arenas
            owner.adopt(message, descriptors.pop())
        elif message.get("type") == "end":
            connection.close()
        for number in descriptors:
            os.close(number)

    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        log(f"--inherit {fd}: {error.strerror}")
        finish()
        return
    connection = Connection(
        keeper.loop,
        sock,
        on_frame=received,
        on_close=lambda connection: finish(),
        most_bytes=MOST_AGENT_BYTES,
    )
    keeper.loop.after(_INHERIT_SECONDS, connection.close)


def _make_keeper(
    keeper_id: str, directory: str, runtime: str, containment: Containment, before: Before
) -> Keeper:
    records = Records(directory)
    return Keeper(
        id=keeper_id,
        directory=directory,
        runtime=runtime,
        loop=Loop(),
        containment=containment,
        before=before,
        records=records,
        outbox=Outbox(keeper_id, records),
    )


def _raise_self() -> Before:
    """Become the reaper, with more descriptors and a higher priority; how it was before."""
    try:
        with open("/proc/self/oom_score_adj") as file:
            oom_score = int(file.read())
    except (OSError, ValueError):
        oom_score = 0
    before = Before(raise_open_files(), sorted(os.sched_getaffinity(0)), oom_score)
    become_subreaper()
    set_priority(_NICE)
    set_oom_score(_OOM_SCORE)
    return before


def _bind_all(runtime: str) -> dict[str, socket.socket]:
    listeners = {}
    for name in ("keeper", "control", "http"):
        path = f"{runtime}/{name}.sock"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(path)
        sock.listen(256)
        listeners[name] = sock
    listeners["http-tcp"] = bind_port(LOOPBACK, 0)
    listeners["http-tcp"].listen(256)
    return listeners


def _watch_signals(loop: Loop, actions: dict[int, Callable[[], None]]) -> None:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)

    def woken(mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in set(reader.recv(4096)):
                if number in actions:
                    actions[number]()

    for number in actions:
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    loop.watch(reader.fileno(), READ, woken)
    # The socket objects live as long as the loop does.
    loop.keep = (reader, writer)


def _close_others(kept: set[int | None]) -> None:
    """What the starter left open is not ours to hold; what it gave us is not for our children."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
    for number in kept - {0, 1, 2, None}:
        if number is not None:
            os.set_inheritable(number, False)


def _say_ready(fd: int | None, word: bytes) -> None:
    if fd is not None:
        with contextlib.suppress(OSError):
            os.write(fd, word)
            os.close(fd)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - the process's entry point: the reason belongs into the log
        log_exception("the keeper")
        sys.exit(70)
