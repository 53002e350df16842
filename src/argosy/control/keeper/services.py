"""Agent and controller: started by the keeper, restarted whenever they end, never given up.

They do not die with the keeper; a new keeper ends the survivors of the old one before it starts its own. The listening
sockets stay here, so a connect waits while a service is away.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from argosy.control.keeper.attempts import close_fd
from argosy.control.keeper.census import is_same_alive, look_at
from argosy.control.keeper.children import Errand, read_report, start_child
from argosy.control.keeper.environment import open_log
from argosy.control.keeper.kernel import send_signal
from argosy.control.keeper.loop import READ, Timer, log
from argosy.control.keeper.state import Keeper

_QUICK_SECONDS = 5.0
_FIRST_PAUSE = 0.05
_MOST_PAUSE = 10.0
_SURVIVOR_SECONDS = 2.0


@dataclass
class Service:
    """One of the two programs beside the keeper."""

    name: str
    arguments: list[str]
    sockets: list[str]
    """listeners it is given, as the descriptors 3, 4, …"""
    pid: int = 0
    pidfd: int = -1
    report: int = -1
    began: float = 0.0
    pause: float = 0.0
    restarts: int = 0
    timer: Timer | None = None


class Services:
    """Starts and restarts them."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        common = ["--directory", keeper.directory, "--runtime", keeper.runtime]
        fds = ["--control-fd", "3", "--http-fd", "4", "--http-tcp-fd", "5"]
        self.all = [
            Service("controller", [*common, *fds], ["control", "http", "http-tcp"]),
            Service("agent", common, []),
        ]
        self.is_ending = False
        self.on_gone: Callable[[], None] = lambda: None

    def start_all(self) -> None:
        """Start both."""
        for service in self.all:
            self._start(service)

    def owns(self, pid: int) -> bool:
        """Whether the child is one of them."""
        return any(service.pid == pid for service in self.all)

    def end_all(self, then: Callable[[], None]) -> None:
        """Ask them to end, kill after a moment; `then` is called when both are gone."""
        self.is_ending = True
        self.on_gone = then
        for service in self.all:
            if service.timer is not None:
                service.timer.cancel()
            if service.pidfd >= 0:
                send_signal(service.pidfd, signal.SIGTERM)
        if self._are_gone():
            then()
        else:
            self.keeper.loop.after(5.0, self._kill_all)

    def statistics(self) -> dict[str, Any]:
        """For people."""
        return {
            service.name: {"pid": service.pid, "restarts": service.restarts} for service in self.all
        }

    def to_state(self) -> list[dict[str, Any]]:
        """For a successor program."""
        return [
            {"name": service.name, "pid": service.pid, "restarts": service.restarts}
            for service in self.all
        ]

    def take_state(self, state: list[dict[str, Any]]) -> None:
        """Go on with the predecessor's children."""
        for service, saved in zip(self.all, state, strict=True):
            service.restarts = saved["restarts"]
            if saved["pid"]:
                self._adopt(service, saved["pid"])
            else:
                self._start(service)

    def _start(self, service: Service) -> None:
        if self.is_ending:
            return
        service.began = time.monotonic()
        owned: list[int] = []
        try:
            owned.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            owned.append(self._open_log(service.name))
            given = [self.keeper.listeners[name].fileno() for name in service.sockets]
            env = {k: v for k, v in os.environ.items() if k != "ARGOSY_MARK"}
            errand = Errand(
                argv=[sys.executable, "-m", f"argosy.control.{service.name}", *service.arguments],
                env=env,
                umask=0o077,
                nice=os.getpriority(os.PRIO_PROCESS, 0),
                descriptors=[owned[0], owned[1], owned[1], *given],
                dies_with_keeper=False,
            )
            pid, service.report = start_child(errand)
        except OSError as error:
            log(f"{service.name} could not be started: {error}")
            self._again(service)
            return
        finally:
            for fd in owned:
                os.close(fd)
        self._adopt(service, pid)

    def _adopt(self, service: Service, pid: int) -> None:
        service.pid = pid
        service.pidfd = os.pidfd_open(pid)
        service.began = time.monotonic()
        self.keeper.loop.watch(service.pidfd, READ, lambda mask: self._ended(service))
        seen = look_at(pid)
        start = seen.start if seen is not None else 0
        self.keeper.services[service.name] = {"pid": pid, "start": start}
        self.keeper.write_record()

    def _open_log(self, name: str) -> int:
        try:
            return open_log(f"{self.keeper.directory}/{name}.log")
        except OSError as error:
            log(f"{name}.log cannot be opened: {error.strerror}")
            return os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)

    def _ended(self, service: Service) -> None:
        info = os.waitid(os.P_PIDFD, service.pidfd, os.WEXITED | os.WNOHANG)
        if info is None:
            return
        self.keeper.loop.forget(service.pidfd)
        service.pidfd = close_fd(service.pidfd)
        pid, service.pid = service.pid, 0
        self.keeper.services.pop(service.name, None)
        if self.is_ending:
            if self._are_gone():
                self.on_gone()
            return
        word = "code" if info.si_code == os.CLD_EXITED else "signal"
        error = self._last_words(service)
        text = f"{service.name} (pid {pid}) ended with {word} {info.si_status}{error}"
        self.keeper.outbox.note(f"{text}; it is started again")
        is_killed = word == "signal" and info.si_status == signal.SIGKILL
        self._again(service, is_killed=is_killed)

    def _last_words(self, service: Service) -> str:
        text = b""
        if service.report >= 0:
            try:
                text = os.read(service.report, 65536)
            except BlockingIOError:
                pass
            service.report = close_fd(service.report)
        error = read_report(text)[1]
        return f": {error}" if error else ""

    def _again(self, service: Service, *, is_killed: bool = False) -> None:
        lived = time.monotonic() - service.began
        service.pause = next_pause(service.pause, lived, is_killed=is_killed)
        service.restarts += 1
        service.timer = self.keeper.loop.after(service.pause, lambda: self._start(service))

    def _are_gone(self) -> bool:
        return all(service.pidfd < 0 for service in self.all)

    def _kill_all(self) -> None:
        for service in self.all:
            if service.pidfd >= 0:
                send_signal(service.pidfd, signal.SIGKILL)


def next_pause(pause: float, lived_seconds: float, *, is_killed: bool) -> float:
    """Seconds until the next start: none after a while of life or a kill from outside, growing ones after quick ends."""
    if is_killed or lived_seconds >= _QUICK_SECONDS:
        return 0.0
    return min(max(_FIRST_PAUSE, pause * 2), _MOST_PAUSE)


def end_survivors(keeper: Keeper, recorded: dict[str, Any], then: Callable[[], None]) -> None:
    """End agent and controller of a dead keeper (they hold locks and old sockets), then go on."""
    left = {}
    for entry in recorded.values():
        if not isinstance(entry, dict):
            continue
        pid, start = int(entry.get("pid", 0)), int(entry.get("start", 0))
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        if is_same_alive(pid, start):
            left[pidfd] = pid
        else:
            os.close(pidfd)
    if not left:
        then()
        return

    def gone(pidfd: int) -> None:
        keeper.loop.forget(pidfd)
        os.close(pidfd)
        del left[pidfd]
        if not left:
            then()

    def kill() -> None:
        for pidfd in left:
            send_signal(pidfd, signal.SIGKILL)

    for pidfd, pid in list(left.items()):
        log(f"ends process {pid}, a service of the keeper before")
        send_signal(pidfd, signal.SIGTERM)
        keeper.loop.watch(pidfd, READ, lambda mask, pidfd=pidfd: gone(pidfd))  # type: ignore[misc]
    keeper.loop.after(_SURVIVOR_SECONDS, kill)
