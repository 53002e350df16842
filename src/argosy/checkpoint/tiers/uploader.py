"""The checkpointer's side of uploads and of copies to peers: which steps go, one after another, to a process of its own, and what became of them.

Never waits in training's way: a thread talks to the process. When uploads are slower than saves the oldest that wait are left out. A process that
dies, or is silent for longer than an upload may take and is killed for it, is started again and goes on where it was. Held steps must stay on disk until then. No torch.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from argosy.checkpoint import processes
from argosy.checkpoint.peers.settings import Copying
from argosy.checkpoint.tiers import orders
from argosy.checkpoint.tiers.orders import Answer, Begin, Failed, Progress, Send, Uploaded
from argosy.checkpoint.tiers.settings import Objects
from argosy.errors import ArgosyError, TimedOut

_LOG = logging.getLogger("argosy.checkpoint")
_MOST_WAITING = 2
_ATTEMPTS = 2
_HAND_OVER_SECONDS = 10.0
_LATE_SECONDS = 60.0
"""A process that gives a step up when its time is over says so itself, a little later."""
LOST = "UploaderLost"

Told = Callable[[Uploaded | Failed], None]
"""Hears what became of each step, in another thread."""
Advanced = Callable[[int, int], None]
"""Hears of which step how many bytes are sent so far, in that thread too."""


class Uploader:
    """The uploads of one store, or its copies to peers."""

    def __init__(
        self,
        store: Path,
        run: str,
        target: Objects | Copying,
        told: Told,
        advanced: Advanced | None = None,
    ) -> None:
        copying = target if isinstance(target, Copying) else None
        objects = target if isinstance(target, Objects) else None
        self._rules = target.peers if isinstance(target, Copying) else target
        self._done = "uploaded" if copying is None else "copied to peers"
        self._begin = Begin(store=str(store.absolute()), run=run, objects=objects, copying=copying)
        self._told = told
        self._advanced = advanced
        self._changed = threading.Condition()
        self._waiting: list[int] = []
        self._current: int | None = None
        self._is_read = False
        """Whether the current step is still needed on disk."""
        self._is_handed = False
        """Whether the process has been told of the current step: then it finishes it, whatever becomes of this one."""
        self._done_bytes = 0
        self._offered_at: float | None = None
        self._failures: list[ArgosyError] = []
        self._is_closing = False
        self._is_abandoned = False
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self.uploaded: list[int] = []
        """Steps that this session has seen committed, in order."""

    def offer(self, step: int, *, is_old: bool = False) -> bool:
        """A step has become durable; whether it is going to be uploaded. `is_old`: saved by an earlier session, and perhaps uploaded."""
        now = time.monotonic()
        with self._changed:
            since = None if self._offered_at is None else now - self._offered_at
            is_early = since is not None and since < self._rules.every_seconds
            if self._is_closing or step % self._rules.every or (is_early and not is_old):
                return False
            if not is_old:
                self._offered_at = now
            self._waiting.append(step)
            left_out, self._waiting = self._waiting[:-_MOST_WAITING], self._waiting[-_MOST_WAITING:]
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="argosy-uploader", daemon=True
                )
                self._thread.start()
                # At the end of the interpreter this thread stands still: nobody may wait for it then.
                atexit.register(_abandon, weakref.ref(self))
            self._changed.notify_all()
        for one in left_out:
            _LOG.warning("step %d is not %s: that is slower than saves are", one, self._done)
        return True

    def held(self) -> set[int]:
        """Steps that are still needed on disk."""
        with self._changed:
            current = self._current if self._is_read else None
            return {*self._waiting, *([] if current is None else [current])}

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is left to upload."""
        with self._changed:
            if not self._changed.wait_for(self._is_idle, timeout):
                raise TimedOut(
                    f"step {self._current} is not {self._done} after {timeout} s",
                    fix="wait longer, or see whether the other side answers",
                )

    def raise_failed(self) -> None:
        """By the policy: raise the first failure that nobody was told yet."""
        with self._changed:
            failures, self._failures = self._failures, []
        if failures and self._rules.raises:
            raise failures[0]

    def statistics(self) -> dict[str, object]:
        """What is going on."""
        with self._changed:
            return {
                "current": self._current,
                "current_bytes": self._done_bytes,
                "waiting": list(self._waiting),
                "uploaded": list(self.uploaded),
                "process": self._process.pid if self._process is not None else None,
            }

    def close(self) -> None:
        """Nothing more comes; the process finishes what it has and ends."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None and self._is_idle() and not self._is_abandoned:
            self._thread.join()

    def abandon(self) -> None:
        """The interpreter ends: the process finishes the upload that is under way by itself; nobody waits any more, but where it would end with this one."""
        with self._changed:
            if processes.controller_socket() and not self._is_idle():
                _LOG.info("waiting until step %s is %s", self._current, self._done)
                self._changed.wait_for(self._is_idle)
            # The thread still runs now, and needs a moment to start the process.
            self._changed.wait_for(lambda: self._is_handed or self._is_idle(), _HAND_OVER_SECONDS)
            self._is_abandoned = self._is_closing = True
            self._waiting.clear()
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        return self._is_abandoned or (self._current is None and not self._waiting)

    def _run(self) -> None:
        """The thread."""
        while (step := self._next()) is not None:
            answer: Uploaded | Failed | None = None
            for _ in range(_ATTEMPTS):
                answer = self._ask(step)
                if answer is not None:
                    break
            self._finish(step, answer or _lost(step))
        self._end_process()

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            self._current, self._done_bytes, self._is_read = self._waiting.pop(0), 0, True
            self._is_handed = False
            return self._current

    def _finish(self, step: int, answer: Uploaded | Failed) -> None:
        self._is_read = False
        try:
            self._told(answer)
        finally:
            with self._changed:
                if isinstance(answer, Failed):
                    self._failures.append(error_of(answer))
                else:
                    self.uploaded.append(step)
                self._current = None
                self._changed.notify_all()

    def _ask(self, step: int) -> Uploaded | Failed | None:
        """Have a step uploaded; None when the process has died over it."""
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(orders.encode(Send(step=step)))
            process.stdin.flush()
            with self._changed:
                self._is_handed = True
                self._changed.notify_all()
            for line in _lines(process, self._rules.deadline_seconds + _LATE_SECONDS):
                answer = _decoded(line)
                if isinstance(answer, Progress):
                    self._done_bytes = answer.num_bytes
                    if self._advanced is not None:
                        self._advanced(step, answer.num_bytes)
                elif answer is not None:
                    return answer
        except OSError as failure:
            _LOG.warning("the process that uploads cannot be reached: %s", failure)
        self._end_process()
        return None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "argosy.checkpoint.tiers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env=processes.environment(),
            )
            assert self._process.stdin is not None
            self._process.stdin.write(orders.encode(self._begin))
        return self._process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                try:
                    if pipe is not None:
                        pipe.close()
                except OSError:
                    pass  # it is dead, and what was said to it with it
            try:
                process.wait(_LATE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _abandon(uploader: weakref.ref[Uploader]) -> None:
    found = uploader()
    if found is not None:
        found.abandon()


def error_of(failed: Failed) -> ArgosyError:
    """The error that the process met, as this one raises it."""
    return processes.error_named(failed.kind, failed.what, failed.fix)


def _lost(step: int) -> Failed:
    return Failed(
        step=step,
        kind=LOST,
        what=f"the process that uploads step {step} has ended {_ATTEMPTS} times or was killed as it hung",
        fix="save again: the next upload goes on where it was",
    )


def _lines(process: subprocess.Popen[bytes], seconds: float) -> Iterator[bytes]:
    """What it says until it ends; one that says nothing for so long is killed."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while True:
        if not waiting.poll(1000 * seconds):
            _LOG.warning(
                "the process %d that uploads has said nothing for %.0f s: it was killed",
                process.pid,
                seconds,
            )
            process.kill()
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _decoded(line: bytes) -> Answer | None:
    try:
        return orders.decode_answer(line)
    except msgspec.DecodeError:
        return None  # something else was printed
