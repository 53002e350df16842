"""`python train.py` without a cluster: this process forks one-thread ranks, is their parent and reaper, and keeps their arenas.

`keep_house()` is called by `launch` in the main thread and returns how it ended. What to do is decided in `upkeep`; here it is
done: processes, pidfds, signals and the private socket, in one thread and one loop. It never runs the user's program itself, so that
a replacement can be forked from it at any time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from argosy.errors import ClusterError, ConfigError
from argosy.protocol.peerloss import is_peer_loss
from argosy.worker import births, records, stops
from argosy.worker.members import Exit
from argosy.worker.notices import say, show
from argosy.worker.switchboard import Switchboard
from argosy.worker.upkeep import (
    ERRORS,
    Action,
    Announce,
    End,
    Signal,
    Start,
    TakeStacks,
    Tell,
    Upkeep,
)

_STACKS_SECONDS = 1.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def keep_house(
    body: births.Body,
    *,
    num_ranks: int,
    directory: str,
    environment: Mapping[str, str],
    resume: str = "",
) -> End:
    """Run `body` on so many forked ranks until all have ended well or the household gives up; its end, which the person was told.

    `resume` is the command that goes on with what was saved, for people.
    """
    household = Household(body, num_ranks, directory, environment)
    return household.keep(resume)


@dataclass
class Rank:
    """One living process."""

    pid: int
    pidfd: int
    error: int
    """A memfd that it writes its error to."""


class Household:
    """The parent of a few ranks."""

    def __init__(
        self, body: births.Body, num_ranks: int, directory: str, environment: Mapping[str, str]
    ) -> None:
        self._body: births.Body | list[str] = body
        self._directory = directory
        self._environment = dict(environment)
        self._run = self._environment.get("ARGOSY_RUN") or f"local-{os.getpid()}"
        self._upkeep = Upkeep(num_ranks, self._run)
        self._selector = selectors.PollSelector()
        self._board = Switchboard(self._selector, self._said, self._welcomed)
        self._ranks: dict[str, Rank] = {}
        self._ended: list[str] = []
        self._unborn: list[tuple[str, Exit]] = []
        """Replacements that could not be forked."""
        self._signals: list[int] = []
        self._ports: dict[int, socket.socket] = {}
        """The store's port of each living generation: bound, not listening; rank 0 hosts."""
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)
        self._num_stacks = 0

    def keep(self, resume: str = "") -> End:
        """Start the ranks and stay with them until the end."""
        obstacle = births.find_obstacle()
        if obstacle:
            command = births.command_line()
            if command is None:
                raise ConfigError(
                    f"{obstacle}, so ranks cannot be forked from it",
                    fix="use -n 1, or call launch at the end of a script and start threads in main",
                )
            self._body = command
            say(f"{obstacle}, so its ranks are not forked but started anew")
        gc.collect()
        gc.freeze()
        before = self._listen_to_signals()
        try:
            self._do(self._upkeep.begin(time.monotonic()))
            while not self._upkeep.is_over:
                self._turn()
        finally:
            self._leave(before)
        end = self._upkeep.end
        assert end is not None
        _report(end, self._how_to_go_on(resume) if end.is_stop and resume else "")
        return end

    def _how_to_go_on(self, resume: str) -> str:
        """After a stop, as the end of a sentence; empty: there is nothing to go on with."""
        newest = records.find_newest_save(self._directory)
        if newest is None:
            return ""
        step, path = newest
        where = "" if step == self._upkeep.saved_step else f"; step {step} is saved in {path}"
        return f"{where}; go on: {resume}"

    def _turn(self) -> None:
        """Wait for something to happen and follow it up."""
        due = 0.0 if self._unborn else self._upkeep.due
        timeout = None if due is None else max(0.0, due - time.monotonic())
        for key, mask in self._selector.select(timeout):
            key.data(mask)
        ended, self._ended = self._ended, []
        exits, self._unborn = self._unborn, []
        exits += [(attempt, self._reap(attempt)) for attempt in ended]
        # Seen in one turn they have no order in time: what says that a peer was lost comes last.
        for attempt, exit in sorted(exits, key=lambda pair: is_peer_loss(pair[1].error)):
            self._do(self._upkeep.exited(attempt, exit, time.monotonic()))
        while self._signals:
            self._do(self._upkeep.interrupted(self._signals.pop(0), time.monotonic()))
        due = self._upkeep.due
        if due is not None and due <= time.monotonic():
            self._do(self._upkeep.passed(time.monotonic()))

    # --- actions ----------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Tell):
                self._board.tell(action.attempt, self._complete(action.frame))
            elif isinstance(action, Signal):
                self._signal(self._ranks.get(action.attempt), action.number)
            elif isinstance(action, TakeStacks):
                self._take_stacks(action.reason)
            elif isinstance(action, Announce):
                say(action.text)

    def _start(self, start: Start) -> None:
        token = secrets.token_hex(16)
        self._board.admit(start.attempt, token)
        error = os.memfd_create("argosy-error", os.MFD_CLOEXEC)
        environment = {
            **self._environment,
            **self._variables(start),
            "ARGOSY_KEEPER_SOCKET": self._board.path,
            "ARGOSY_ATTEMPT": start.attempt,
            "ARGOSY_TOKEN": token,
            "TORCHELASTIC_ERROR_FILE": f"/proc/{os.getpid()}/fd/{error}",
        }
        try:
            pid = births.fork(environment, self._body, self._close_copies)
        except OSError as failure:
            os.close(error)
            self._board.dismiss(start.attempt)
            what = f"rank {start.rank} cannot be forked: {failure.strerror}"
            if start.generation > 1:
                # The others go on meanwhile; what is lacking may be there again in a moment.
                self._unborn.append((start.attempt, Exit(None, signal.SIGKILL, what)))
                return
            fix = "use fewer ranks, or raise the limits: ulimit -u, ulimit -v"
            raise ClusterError(what, fix=fix)
        rank = Rank(pid, os.pidfd_open(pid), error)
        self._ranks[start.attempt] = rank
        self._selector.register(
            rank.pidfd, selectors.EVENT_READ, lambda mask: self._ended.append(start.attempt)
        )

    def _variables(self, start: Start) -> dict[str, str]:
        size = start.world_size
        variables = {
            births.PARENT: os.getpid(),
            "ARGOSY_RUN": self._run,
            "ARGOSY_RUN_DIRECTORY": self._directory,
            "ARGOSY_ROLE": "train",
            "ARGOSY_INDEX": start.rank,
            "ARGOSY_GENERATION": start.generation,
            "RANK": start.rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": start.rank,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_RANK": start.rank,
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "train",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._port_of(start.generation),
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "TORCHELASTIC_RESTART_COUNT": start.generation - 1,
            "TORCHELASTIC_RUN_ID": self._run,
            **({stops.STOPPING: 1} if start.is_saving else {}),
        }
        return {name: str(value) for name, value in variables.items()}

    def _port_of(self, generation: int) -> int:
        if generation not in self._ports:
            for old in [number for number in self._ports if number < generation - 1]:
                self._ports.pop(old).close()
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            self._ports[generation] = held
        port: int = self._ports[generation].getsockname()[1]
        return port

    def _complete(self, frame: Mapping[str, Any]) -> Mapping[str, Any]:
        """A told generation with the address of its store."""
        message = frame.get("message")
        if frame.get("type") != "told" or not isinstance(message, dict):
            return frame
        port = self._port_of(message["generation"])
        store = {"master_addr": "127.0.0.1", "master_port": port, "hosted": False}
        return {**frame, "message": {**message, **store}}

    def _signal(self, rank: Rank | None, number: int) -> None:
        if rank is None:
            return  # reaped in the same turn; its end is told next
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(rank.pidfd, number)
            if number != signal.SIGKILL:
                # A stopped process would not hear it.
                signal.pidfd_send_signal(rank.pidfd, signal.SIGCONT)

    def _take_stacks(self, reason: str) -> None:
        """Keep the stacks of all ranks, if they can be had."""
        beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
        program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
        if program is None:
            return
        self._num_stacks += 1
        path = os.path.join(self._directory, f"stacks-{self._num_stacks}.txt")
        try:
            self._write_stacks(program, path, reason)
        except OSError as error:
            # Evidence is not worth the work of the living.
            say(f"the stacks of the ranks cannot be written: {error.strerror}")
        else:
            say(f"stacks of all ranks: {path}")

    def _write_stacks(self, program: str, path: str, reason: str) -> None:
        """Ask py-spy about all ranks at once; whatever it says in time is kept."""
        with open(path, "wb", buffering=0) as file:
            file.write(f"{reason}\n".encode())
            asked = [
                subprocess.Popen(
                    [program, "dump", "--nonblocking", "--pid", str(rank.pid)],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
                for rank in self._ranks.values()
            ]
            deadline = time.monotonic() + _STACKS_SECONDS
            for process in asked:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    # --- events -----------------------------------------------------------------------------------

    def _reap(self, attempt: str) -> Exit:
        """Take what the process said last and its status; then nothing of it is left."""
        self._board.drain(attempt)
        rank = self._ranks.pop(attempt)
        # Its group is still its own while it is not reaped: what it left running ends with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.pid, signal.SIGKILL)
        info = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED)
        assert info is not None
        error, is_refusal = births.read_error(rank.error)
        self._selector.unregister(rank.pidfd)
        os.close(rank.pidfd)
        os.close(rank.error)
        self._board.dismiss(attempt)
        if error and not is_refusal:
            self._keep_error(attempt, error)
        if info.si_code == os.CLD_EXITED:
            return Exit(info.si_status, None, error, is_refusal)
        return Exit(None, info.si_status, error)

    def _keep_error(self, attempt: str, error: str) -> None:
        """On the terminal a failure that was mended is one line; the rest is here."""
        with contextlib.suppress(OSError):
            path = os.path.join(self._directory, ERRORS)
            with open(path, "a", encoding="utf-8", errors="replace") as file:
                file.write(f"{attempt}:\n{error.rstrip()}\n\n")

    def _said(self, attempt: str, message: Mapping[str, Any]) -> None:
        self._do(self._upkeep.said(attempt, message, time.monotonic()))

    def _welcomed(self, attempt: str) -> None:
        for frame in self._upkeep.welcome_frames(attempt):
            self._board.tell(attempt, self._complete(frame))

    def _woken(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass

    def _listen_to_signals(self) -> dict[int, Any]:
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        before: dict[int, Any] = {}
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(
                    number, lambda number, frame: self._signals.append(number)
                )
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._pause)
        return before

    def _pause(self, number: int, frame: Any) -> None:
        """Ctrl-Z: the ranks are in groups of their own, so it is passed on."""
        for rank in list(self._ranks.values()):
            self._signal_group(rank, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in list(self._ranks.values()):
            self._signal_group(rank, signal.SIGCONT)

    def _signal_group(self, rank: Rank, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, number)

    # --- the end ----------------------------------------------------------------------------------

    def _leave(self, before: Mapping[int, Any]) -> None:
        """Nothing of the household outlives it, also when an error ends it."""
        for attempt, rank in list(self._ranks.items()):
            self._signal(rank, signal.SIGKILL)
            self._reap(attempt)
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            # None: it was not set from Python and cannot be set back from there.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._board.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)
        for held in self._ports.values():
            held.close()
        gc.unfreeze()

    def _close_copies(self) -> None:
        """In a forked child: what belongs to the parent."""
        self._board.close_copies()
        for rank in self._ranks.values():
            os.close(rank.pidfd)
            os.close(rank.error)
        os.close(self._wake)
        os.close(self._waker)
        for held in self._ports.values():
            held.close()


def _report(end: End, go_on: str) -> None:
    """Show why it ended, the first cause once, and how to go on."""
    if end.error:
        show(end.error)
    if end.text:
        say(f"{end.text}{go_on}")
