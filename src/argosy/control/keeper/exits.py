"""How an attempt ends: observed, peers told, tree swept, leader reaped, record on disk, event.

The leader stays a zombie until its tree is gone, so that neither its pid nor its session can be reused meanwhile. Also
stops and kills, which lead here. Nothing in this module starts a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from argosy.control.keeper.attempts import Attempt, close_fd
from argosy.control.keeper.census import describe
from argosy.control.keeper.children import read_report
from argosy.control.keeper.containment import Group, remove_tree
from argosy.control.keeper.ends import frame_of, oldest_generation
from argosy.control.keeper.environment import read_regular
from argosy.control.keeper.frames import Message, encode
from argosy.control.keeper.kernel import send_signal
from argosy.control.keeper.loop import READ, URGENT
from argosy.control.keeper.outbox import bounded_error
from argosy.control.keeper.state import Keeper
from argosy.control.keeper.tracebacks import UNCAUGHT_CODE, read_last_traceback

_SWEEP_SECONDS = 30.0
_REMOVE_TRIES = 20
_MOST_ERROR_FILE_BYTES = 1 << 20


class Exits:
    """Ends attempts and reports it."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.on_ended: list[Callable[[Attempt], None]] = []
        """Called after each exit, in order: stores, orphans, shutdown."""
        self.is_own: Callable[[int], bool] = lambda pid: False
        """Whether a child is a zygote or a service; set by `__main__`."""
        self._reported: set[tuple[int, int]] = set()

    def watch(self, attempt: Attempt) -> None:
        """From now on the process's end is noticed at once."""
        self.keeper.loop.watch(attempt.pidfd, READ, lambda mask: self.observe(attempt))

    def observe(self, attempt: Attempt) -> None:
        """Look whether the leader has ended; if so, everything else follows."""
        if attempt.state in ("exiting", "exited") or not attempt.has_process:
            return
        try:
            info = os.waitid(os.P_PIDFD, attempt.pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            info = None
            if _is_gone(attempt.pidfd):
                # Not our child (any more): the status is lost, the end is not.
                attempt.error = attempt.error or "its exit status was lost"
                self._ended(attempt, None, signal.SIGKILL)
            return
        if info is None:
            return
        if info.si_code == os.CLD_EXITED:
            self._ended(attempt, info.si_status, None)
        else:
            self._ended(attempt, None, info.si_status)

    def _ended(self, attempt: Attempt, code: int | None, number: int | None) -> None:
        attempt.status = (code, number)
        attempt.seen_at = time.time()
        attempt.state = "exiting"
        self.keeper.loop.forget(attempt.pidfd)
        self.tell_peers(attempt)
        for link in list(attempt.links):
            # What it said last is told before its end: afterwards nobody would heed it.
            link.drain()
        if attempt.stop_timer is not None:
            attempt.stop_timer.cancel()
        attempt.gate = close_fd(attempt.gate)
        self._read_last_report(attempt)
        for guest in self.keeper.guests_of(attempt.attempt):
            # In a cgroup of their host they end with it anyway; a scan would not find them.
            self.kill(guest)
        Sweep(self.keeper, attempt, lambda: self._finish(attempt)).begin()

    def tell_peers(self, attempt: Attempt) -> None:
        """The first thing after a death: before sweep, disk or agent."""
        if not attempt.is_member:
            return
        frame = frame_of(attempt)
        self._send_peers(attempt.run, attempt.role, frame)
        if attempt.rank is not None:
            self.keeper.ends.remember(
                attempt.run, attempt.role, frame, lambda: self._oldest_generation(attempt)
            )

    def _oldest_generation(self, ended: Attempt) -> int:
        """The oldest generation in which a member of the role may still believe itself."""
        living = self.keeper.live_of(ended.run, ended.role)
        oldest = [oldest_generation(peer) for peer in living if peer.rank is not None]
        return min(oldest, default=ended.generation)

    def tell_late_place(self, attempt: str, generation: int, rank: int) -> bool:
        """A member of a new generation had ended before it could be told; its peers must not wait for it. False: not known."""
        role = self.keeper.ends.role_of(attempt)
        if role is None:
            return False
        frame = self.keeper.ends.give_place(attempt, generation, rank)
        if frame is not None:
            self._send_peers(*role, frame)
        return True

    def _send_peers(self, run: str, role: str, frame: Message) -> None:
        peers = list(self.keeper.linked.get((run, role), {}).values())
        data = encode(frame) if peers else b""
        for peer in peers:
            if peer.attempt != frame["attempt"]:
                for link in list(peer.links):
                    link.send_bytes(data)

    def fail(self, attempt: Attempt, error: str) -> None:
        """It never became a process: a clean exit with the reason."""
        attempt.error = error
        attempt.has_failed_to_start = True
        attempt.status = (None, attempt.doom or None)
        attempt.seen_at = time.time()
        self.tell_peers(attempt)
        attempt.gate = close_fd(attempt.gate)
        attempt.report = close_fd(attempt.report)
        self._conclude(attempt, None)

    # --- being told to end ---------------------------------------------------------------------

    def stop(self, attempt: Attempt, number: int, grace_seconds: float) -> None:
        """Signal the leader; after the grace kill the whole tree. The shorter grace of several counts, and is not prolonged."""
        if not attempt.is_live:
            return
        if not attempt.has_process:
            self._cancel(attempt, number)
            return
        due = time.monotonic() + max(0.0, grace_seconds)
        if attempt.stop_timer is None:
            attempt.stop_grace = grace_seconds
            self._kill_at(attempt, due)
        elif due < attempt.stop_due:
            attempt.stop_grace = 0.0
            self._kill_at(attempt, due)
        if attempt.stop_signal != number:
            attempt.stop_signal = number
            if attempt.group is not None:
                attempt.group.take_census()
            send_signal(attempt.pidfd, number)
            # A stopped process would sleep through its grace.
            send_signal(attempt.pidfd, signal.SIGCONT)

    def prolong(self, attempt: Attempt) -> None:
        """It is told to end and says that its save goes on: its grace begins anew, unless everything is to end."""
        if attempt.stop_timer is None or not attempt.stop_grace or self.keeper.is_ending:
            return
        due = time.monotonic() + attempt.stop_grace
        if attempt.is_live and due > attempt.stop_due:
            self._kill_at(attempt, due)

    def _kill_at(self, attempt: Attempt, due: float) -> None:
        if attempt.stop_timer is not None:
            attempt.stop_timer.cancel()
        attempt.stop_due = due
        seconds = due - time.monotonic()
        attempt.stop_timer = self.keeper.loop.after(seconds, lambda: self.kill(attempt))

    def resume_stop(self, attempt: Attempt, number: int, left_seconds: float) -> None:
        """Go on with a stop that a predecessor program began: the signal was sent, the grace runs."""
        attempt.stop_signal = number
        self._kill_at(attempt, time.monotonic() + left_seconds)

    def kill(self, attempt: Attempt) -> None:
        """Kill the whole tree at once."""
        if not attempt.is_live:
            return
        if not attempt.has_process:
            self._cancel(attempt, signal.SIGKILL)
            return
        if attempt.group is not None and attempt.owns_group:
            # What it finds is counted as swept: the leader did not end it itself.
            attempt.group.take_census()
            attempt.killed.update(attempt.group.kill())
        send_signal(attempt.pidfd, signal.SIGKILL)

    def _cancel(self, attempt: Attempt, number: int) -> None:
        """Stopped before there is a process. With a fork under way the gate is open: then it is ended once known."""
        attempt.doom = number
        if attempt.gate < 0:
            self.fail(attempt, "it was stopped before it was started")

    def signal(self, attempt: Attempt, number: int) -> bool:
        """To the leader alone; False when there is none."""
        return attempt.has_process and attempt.is_live and send_signal(attempt.pidfd, number)

    # --- the end ------------------------------------------------------------------------------

    def _read_last_report(self, attempt: Attempt) -> None:
        """The exec report may still be unread when the exit is seen in the same wake."""
        if attempt.report < 0:
            return
        self.keeper.loop.forget(attempt.report)
        try:
            while part := os.read(attempt.report, 65536):
                attempt.report_text += part
        except BlockingIOError:
            pass
        attempt.report = close_fd(attempt.report)
        _, error = read_report(attempt.report_text)
        if error:
            attempt.error = error
            attempt.has_failed_to_start = True

    def _finish(self, attempt: Attempt) -> None:
        usage: object = None
        try:
            _, _, usage = os.wait4(attempt.pid, 0)
        except ChildProcessError:
            pass
        attempt.pidfd = close_fd(attempt.pidfd)
        self._conclude(attempt, usage)

    def _conclude(self, attempt: Attempt, usage: object) -> None:
        keeper = self.keeper
        keeper.conclude(attempt)
        for link in list(attempt.links):
            link.close()
        is_oom = attempt.memory is not None and attempt.memory.oom_kills() > 0
        if attempt.terminal is not None:
            attempt.terminal.finish()
            attempt.terminal = None
        self._remove_groups(attempt)
        keeper.arenas.user_ended(attempt.run, attempt.attempt)
        code, number = attempt.status
        if attempt.has_failed_to_start:
            code = None
        if attempt.is_helper:
            keeper.records.remove_attempt(attempt.attempt)
            keeper.attempts.pop(attempt.attempt, None)
        else:
            attempt.number = keeper.outbox.emit(
                {
                    "event": "exited",
                    "attempt": attempt.attempt,
                    "run": attempt.run,
                    "code": code,
                    "signal": number,
                    "is_oom": is_oom and code != 0,
                    "error": bounded_error(self._error_of(attempt, code)),
                    "swept": len(attempt.killed - {attempt.pid}),
                    "at": attempt.seen_at,
                    "user_seconds": getattr(usage, "ru_utime", 0.0),
                    "system_seconds": getattr(usage, "ru_stime", 0.0),
                    "max_rss_bytes": getattr(usage, "ru_maxrss", 0) * 1024,
                }
            )
        attempt.order = {}
        attempt.killed = set()
        for ended in self.on_ended:
            ended(attempt)

    def _error_of(self, attempt: Attempt, code: int | None) -> str:
        path = attempt.order.get("error_file")
        if not attempt.has_failed_to_start and code != 0 and path:
            text = read_regular(path, _MOST_ERROR_FILE_BYTES)
            if text:
                return text
        if code == UNCAUGHT_CODE and not attempt.error and not attempt.is_guest:
            return read_last_traceback(attempt.order.get("stderr") or "/dev/null")
        return attempt.error if code != 0 else ""

    def _remove_groups(self, attempt: Attempt, tries: int = _REMOVE_TRIES) -> None:
        """A cgroup may be busy for a moment after its last process; try again, then leave it."""
        group = attempt.group if attempt.owns_group else None
        is_gone = group is None or group.remove()
        memory = attempt.memory
        if memory is not None and not memory.is_version_two:
            is_gone = remove_tree(memory.path) and is_gone
        if not is_gone and tries > 0:
            self.keeper.loop.after(0.05, lambda: self._remove_groups(attempt, tries - 1))

    # --- orphans ------------------------------------------------------------------------------

    def reap_orphans(self) -> None:
        """Reap children that nobody here knows: daemons of attempts, re-parented to the keeper."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            except ChildProcessError:
                return
            if info is None:
                return
            if self._is_known_child(info.si_pid):
                # Its own path reaps it; what hides behind it is looked at again after that.
                return
            os.waitpid(info.si_pid, os.WNOHANG)

    def _is_known_child(self, pid: int) -> bool:
        if self.is_own(pid):
            return True
        return any(a.pid == pid and a.has_process for a in self.keeper.attempts.values())

    def report_strangers(self) -> None:
        """Under `scan`: name live children that no attempt can be proven to own; never touch them."""
        known = {a.pid for a in self.keeper.attempts.values() if a.has_process}
        for seen in self.keeper.containment.lookout.look().everybody.values():
            key = (seen.pid, seen.start)
            if seen.parent != self.keeper.pid or seen.pid in known or not seen.is_alive:
                continue
            if key in self._reported or self.is_own(seen.pid):
                continue
            self._reported.add(key)
            self.keeper.outbox.note(
                f"process {describe(seen.pid)} outlived its parent and belongs to no known attempt; "
                "it was left alone"
            )


class Sweep:
    """Ends what is left of a tree after its leader, and waits until it is gone."""

    def __init__(self, keeper: Keeper, attempt: Attempt, done: Callable[[], None]) -> None:
        self.keeper = keeper
        self.attempt = attempt
        self.done = done
        self.group: Group | None = attempt.group
        if attempt.group is not None and not attempt.owns_group:
            self.group = attempt.group.part(keeper.mark(attempt.attempt), attempt.pid)
        self._wake = -1
        self._until = time.monotonic() + _SWEEP_SECONDS
        self._pause = 0.001

    def begin(self) -> None:
        """Most trees are empty by now; then `done` is called at once."""
        group = self.group
        if group is None or self._is_over(group):
            self.done()
            return
        if group.wake_path is not None:
            try:
                self._wake = os.open(group.wake_path, os.O_RDONLY | os.O_CLOEXEC)
                self.keeper.loop.watch(self._wake, URGENT, lambda mask: self._woken())
            except OSError:
                self._wake = close_fd(self._wake)
        self._later()

    def _is_over(self, group: Group) -> bool:
        found = group.kill()
        self.attempt.killed.update(found)
        return not found and group.is_empty()

    def _woken(self) -> None:
        # Reading re-arms the notification.
        with contextlib.suppress(OSError):
            os.pread(self._wake, 256, 0)
        if self.group is not None and self.group.is_empty():
            self._end()

    def _later(self) -> None:
        self._pause = min(self._pause * 2, 0.5)
        self.keeper.loop.after(self._pause, self._again)

    def _again(self) -> None:
        if self.group is None:
            return
        if self._is_over(self.group):
            self._end()
        elif time.monotonic() > self._until:
            left = [describe(process.pid) for process in self.group.members()]
            self.keeper.outbox.note(
                f"could not be killed within {_SWEEP_SECONDS:.0f} s: {', '.join(left)}",
                run=self.attempt.run,
                attempt=self.attempt.attempt,
                level="error",
            )
            self._end()
        else:
            self._later()

    def _end(self) -> None:
        self.group = None
        if self._wake >= 0:
            self.keeper.loop.forget(self._wake)
            self._wake = close_fd(self._wake)
        self.done()


def _is_gone(pidfd: int) -> bool:
    return not send_signal(pidfd, 0)
