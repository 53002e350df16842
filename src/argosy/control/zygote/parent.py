"""The zygote's loop: preload, answer the keeper's `fork` frames, and grow a second layer when idle.

A batch goes through one intermediate process that forks every rank and exits, so the ranks become children of the keeper and
the zygote's death costs none of them. In a forked rank `serve` returns its assignment to the top of the stack. The loop never
runs user code and never waits for a rank.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from argosy.control.zygote import kernel
from argosy.control.zygote.assignment import Assignment, BatchError, read_batch
from argosy.control.zygote.frames import Channel, FrameError
from argosy.control.zygote.libraries import Libraries, keep_finalizers_at_home
from argosy.control.zygote.preload import SECOND_LAYER, PreloadError, Preloads
from argosy.control.zygote.surroundings import Surroundings

_TIDY_SECONDS = 0.25
"""How long nothing must have been asked before memory is gathered for cheaper forks; a cold start never waits for it."""
_SECOND_LAYER_SECONDS = 1.0
"""How long nothing must have been asked before the second layer is begun."""

_PATIENT_NICE = 3
"""Little, as a gang that restarts soon after its first start gains a second per rank from the second layer."""


def serve(sock: socket.socket) -> Assignment | None:
    """Serve the keeper until it hangs up (None), or, in a forked rank, return what that rank is to do."""
    # A program that looks into `sys.modules` finds its preloads, but not the modules that forked it.
    for name in [name for name in sys.modules if name.startswith("argosy.control")]:
        del sys.modules[name]
    return _Parent(Channel(sock)).serve()


class _Parent:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._keeper = os.getppid()
        self._surroundings = Surroundings.find()
        if not sys.flags.safe_path:
            # The directory that the keeper happens to be in: preloads must not be found there.
            del sys.path[0]
        self._preloads = Preloads()
        self._libraries = Libraries()
        self._layer = 0
        self._wants_second_layer = False
        self._is_tidy = True
        self._last_asked = time.monotonic()

    def serve(self) -> Assignment | None:
        while True:
            try:
                self._use_idle_time()
                received = self._channel.receive()
                if received is None:
                    return None
                message, descriptors = received
                assignment = self._answer(message, descriptors)
            except FrameError as error:
                sys.exit(f"zygote: the keeper sent {error}")
            except ConnectionError:
                return None  # the keeper hung up while it was written to
            if assignment is not None:
                return assignment
            for descriptor in descriptors:
                os.close(descriptor)
            self._last_asked = time.monotonic()

    def _use_idle_time(self) -> None:
        """Do what makes later forks faster, as long as the keeper asks nothing."""
        if not self._is_tidy and not self._wait_asked(_TIDY_SECONDS):
            kernel.collapse_memory()
            self._is_tidy = True
        if not (self._is_tidy and self._wants_second_layer):
            return
        if not self._wait_asked(_SECOND_LAYER_SECONDS):
            self._begin_second_layer()

    def _answer(self, message: dict[str, Any], descriptors: list[int]) -> Assignment | None:
        kind = message.get("type")
        if kind == "fork":
            # Every fork leaves huge pages split where the two processes have written since.
            self._is_tidy = False
            return self._fork(message, descriptors)
        if kind == "preload":
            modules = [str(module) for module in message.get("modules", [])]
            self._load(modules, int(message.get("layer", 1)))
            self._wants_second_layer = self._layer == 1 and "torch" in sys.modules
            return None
        sys.exit(f"zygote: the keeper sent a frame of unknown type {kind!r}")

    def _load(self, modules: list[str], layer: int) -> None:
        """Import and say so. A second layer does it in the time that others leave, and is tidy when it says ready."""
        is_patient = layer > 1
        try:
            with _leaving_time_to_others() if is_patient else contextlib.nullcontext():
                seconds = self._preloads.load(modules)
                self._libraries = Libraries.find()
                keep_finalizers_at_home()
                # Frozen objects are not visited by the collector, so a child does not copy their pages.
                gc.freeze()
                if is_patient:
                    kernel.collapse_memory()
        except PreloadError as error:
            self._channel.send({"type": "failed", "module": error.module, "error": error.error})
            sys.exit(f"zygote: cannot preload {error}")
        self._layer = layer
        self._is_tidy = is_patient
        threads = kernel.count_tasks()
        self._channel.send(
            {
                "type": "ready",
                "layer": layer,
                "seconds": round(seconds, 3),
                "threads": threads,
                "sources": self._preloads.sources(),
            }
        )

    def _fork(self, message: dict[str, Any], descriptors: list[int]) -> Assignment | None:
        identity = message.get("id")
        try:
            batch = read_batch(message, descriptors, self._surroundings)
        except BatchError as error:
            self._refuse(identity, str(error))
            return None
        for assignment in batch:
            assignment.libraries = self._libraries
            assignment.touched_signals = kernel.find_touched_signals()
        obstacle = self._preloads.find_obstacle() or self._find_shadow(batch)
        if obstacle:
            self._refuse(identity, obstacle)
            return None
        # Here once, instead of once in every rank: there it costs 5 ms of copied pages. The finders stay invalid until used.
        importlib.invalidate_caches()
        # What is still buffered here would be written again by every rank.
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        try:
            intermediate = os.fork()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            self._refuse(identity, f"cannot fork: {error}")
            return None
        if intermediate == 0:
            os.close(read_end)
            return _fork_ranks(batch, write_end)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as file:
            report = file.read()
        os.waitpid(intermediate, 0)
        pids = json.loads(report) if report else "the intermediate process died"
        if isinstance(pids, str):
            self._refuse(identity, pids)
        else:
            self._channel.send({"type": "forked", "id": identity, "pids": pids})
        return None

    def _refuse(self, identity: Any, reason: str) -> None:
        self._channel.send({"type": "refused", "id": identity, "reason": reason})

    def _find_shadow(self, batch: list[Assignment]) -> str:
        for directory in {assignment.import_directory() for assignment in batch} - {""}:
            name = self._preloads.find_shadow(directory)
            if name:
                return f"{os.path.join(directory, name)} shadows a module that the warm parent has"
        return ""

    def _wait_asked(self, idle_seconds: float) -> bool:
        """Wait until the keeper asks something; False once nothing was asked for so long."""
        remaining = self._last_asked + idle_seconds - time.monotonic()
        readable, _, _ = select.select([self._channel], [], [], max(0.0, remaining))
        return bool(readable)

    def _begin_second_layer(self) -> None:
        """Fork a zygote with more imported, through an intermediate, into the keeper's care; go on as it in the child."""
        self._wants_second_layer = False
        if self._preloads.find_obstacle():
            return
        ours, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            intermediate = os.fork()
        except OSError:
            # No memory for a second layer: ranks go on being forked from this one.
            for descriptor in (read_end, write_end):
                os.close(descriptor)
            ours.close()
            theirs.close()
            return
        if intermediate == 0:
            try:
                pid = os.fork()
            except OSError:
                os._exit(1)
            if pid != 0:
                os.write(write_end, str(pid).encode())
                os._exit(0)
            os.close(read_end)
            os.close(write_end)
            ours.close()
            self._become_second_layer(theirs)
            return
        os.close(write_end)
        theirs.close()
        with os.fdopen(read_end, "rb") as file:
            pid = int(file.read() or b"0")
        os.waitpid(intermediate, 0)
        if pid:
            self._channel.send({"type": "layer", "layer": 2, "pid": pid, "fds": 1}, [ours.fileno()])
        ours.close()

    def _become_second_layer(self, sock: socket.socket) -> None:
        if not kernel.wait_adopted(self._keeper):
            os._exit(1)
        self._channel.close()
        self._channel = Channel(sock)
        self._load(list(SECOND_LAYER), 2)


@contextlib.contextmanager
def _leaving_time_to_others() -> Iterator[None]:
    """Ranks of a first run may be computing by now: give way to them, without being starved by them."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if _can_come_back(own):
        os.setpriority(os.PRIO_PROCESS, 0, max(own, 0) + _PATIENT_NICE)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, own)


def _can_come_back(nice: int) -> bool:
    """Whether this process may lower its nice level to this one again: tried, as neither the user nor the capabilities tell it everywhere."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice - 1)
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except PermissionError:
        return False
    return True


def _fork_ranks(batch: list[Assignment], report: int) -> Assignment:
    """In the intermediate: fork every rank, report the pids and exit. Returns in the ranks alone."""
    pids: list[int] = []
    try:
        gone_read, gone_write = os.pipe()
    except OSError as error:
        _report_and_exit(report, f"cannot make a pipe: {error}")
    for assignment in batch:
        try:
            pid = os.fork()
        except OSError as error:
            for other in pids:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            _report_and_exit(report, f"cannot fork rank {len(pids)} of {len(batch)}: {error}")
        if pid == 0:
            os.close(report)
            os.close(gone_write)
            assignment.parent_gone = gone_read
            return assignment
        pids.append(pid)
    return _report_and_exit(report, pids)


def _report_and_exit(report: int, answer: list[int] | str) -> NoReturn:
    data = json.dumps(answer).encode()
    while data:
        data = data[os.write(report, data) :]
    os._exit(0)
