"""A rank's side of the writer process: finds or starts it, gives it memory and jobs, and hears how they go.

One connection per store; answers come in a thread of its own, which lives as long as there are jobs. A writer that dies, or says nothing for as long as a job may take, fails its
jobs with `WriterLost`, and the next job starts another where it can. One that does not even answer hangs: it is killed, so that nothing waits for what it holds.
Never touches the store but to reach the socket.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from argosy.checkpoint import boards, names, processes, sockets
from argosy.checkpoint.slots import SnapshotSlot
from argosy.checkpoint.writer import messages
from argosy.checkpoint.writer.messages import (
    Accepted,
    Answer,
    Ask,
    Doing,
    Durable,
    Failed,
    Hello,
    Job,
    Memory,
    Progress,
    Staged,
    Welcome,
)
from argosy.errors import ArgosyError, ClusterError, ProtocolError

_LOG = logging.getLogger("argosy.checkpoint")
Told = Callable[[Progress | Durable | Failed], None]

_START_SECONDS = 60.0
_ANSWER_SECONDS = 20.0
"""For what a writer that does not hang answers at once, on however busy a machine."""
_ASK_SECONDS = 2.0
_SEND_TIMEOUT = struct.pack("ll", int(_START_SECONDS), 0)
_LATE_SECONDS = 2.0
"""A writer that gives a job up when its time is over says so itself, a little later."""
_ATTEMPTS = 3
_SAVE_AGAIN = "save again: the next save starts another one"
LOST = "WriterLost"
MODULE = "argosy.checkpoint.writer"


class WriterLost(ClusterError):
    """The writer process has ended before it had written everything, or hangs."""


class WriterAbsent(ClusterError):
    """No writer process can be had here."""


class WriterClient:
    """The connection of one rank."""

    def __init__(self, store: Path) -> None:
        self._store = store.resolve()
        self._lock = threading.RLock()
        self._link: socket.socket | None = None
        self._asked: socket.socket | None = None
        """The connection on which a writer was asked for something that it has to answer at once."""
        self._is_given_up = False
        self._writer_pid = 0
        self._numbers = itertools.count(1)
        self._given: dict[int, SnapshotSlot] = {}
        self._jobs: dict[int, _Sent] = {}
        self._listened: socket.socket | None = None
        """The connection that a thread listens to."""

    @property
    def writer_pid(self) -> int:
        """Of the process that is connected; 0 for none."""
        return self._writer_pid if self._link is not None else 0

    def connect(self) -> None:
        """Have a writer; WriterAbsent when none can be started."""
        with self._lock:
            if (
                self._link is not None
                and self._listened is not self._link
                and _has_ended(self._link)
            ):
                self._link.close()
                self._link = None
            if self._link is None:
                self._link = self._connected()

    def submit(
        self,
        job: Job,
        descriptors: Sequence[int],
        told: Told,
        slot: SnapshotSlot | None = None,
    ) -> None:
        """Hand over a job with what it needs, and the slot that a snapshot lies in; when this returns the writer finishes it whatever happens to this process.

        `told` hears of its progress and its end, in another thread.
        """
        with self._lock:
            self.connect()
            link = self._link
            assert link is not None
            accepted = threading.Event()
            try:
                patience = _patience(job)
                _look_after(link, patience)
                self._have_listener(link)
                self._jobs[job.number] = _Sent(link, told, accepted, patience)
                if slot is not None and isinstance(job.source, Staged):
                    self._give(link, job.source.memory, slot)
                messages.send(link, job, *descriptors)
            except OSError:
                _shut(link)  # the listening thread sees the end, and tells
        if not accepted.wait(_START_SECONDS):
            raise self._not_accepted(job, link)

    def _not_accepted(self, job: Job, link: socket.socket) -> WriterLost:
        """The writer has not said that it has a job. One that hangs is killed: what it was given lies in its socket, and nobody else would ever connect to it."""
        with self._lock:
            self._jobs.pop(job.number, None)  # who asked hears of it here
            if self._link is link:
                self._link = None  # the next save has another connection
            pid = self._writer_pid
        _shut(link)  # whoever listens sees the end, and closes it
        if ask(self._store) is None and end_hung(self._store) == pid:
            return WriterLost(
                f"the writer process {pid} did not answer: it was killed", fix=_SAVE_AGAIN
            )
        return WriterLost(f"the writer process {pid} does not answer", fix=_mend(pid))

    def _give(self, link: socket.socket, place: int, slot: SnapshotSlot) -> None:
        if self._given.get(place) is not slot:
            messages.send(link, Memory(number=place), slot.descriptor)
            self._given[place] = slot

    def next_number(self) -> int:
        """For a job."""
        return next(self._numbers)

    def forget(self, place: int) -> None:
        """The slot at a place is about to be replaced."""
        with self._lock:
            self._given.pop(place, None)

    def close(self) -> None:
        """Go; the writer finishes what it has and ends when nobody else is there."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            _shut(link)
            link.close()

    def give_up(self) -> None:
        """The writer hangs: what it was given fails now, and so does what it would be given. Waits for nobody."""
        self._is_given_up = True
        for link in (self._link, self._asked):
            if link is not None:
                _shut(link)  # whoever listens sees the end, and tells

    def _connected(self) -> socket.socket:
        why = ""
        self._is_given_up = False
        for _ in range(_ATTEMPTS):
            link = self._greeted()
            if link is not None:
                return link
            why = self._start()
        link = self._greeted()
        if link is None:
            raise WriterAbsent(
                f"no writer process can be started for {self._store}{why}",
                fix="see whether this file system can hold a socket",
            )
        return link

    def _greeted(self) -> socket.socket | None:
        """A connection to a writer; None when there is none, or one that is about to end. WriterAbsent when one hangs and cannot be ended."""
        link = self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        pid, is_hung = 0, False
        try:
            pid = _greet(link, self._store, _ANSWER_SECONDS)
        except TimeoutError:
            is_hung = True
        except OSError:
            pass
        finally:
            self._asked = None
        if pid:
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            self._writer_pid = pid
            self._given.clear()
            return link
        link.close()
        if (is_hung or self._is_given_up) and not end_hung(self._store):
            raise WriterAbsent(f"the writer process of {self._store} does not answer", fix=_mend(0))
        return None

    def _start(self) -> str:
        """Start one; why it could not, for people."""
        helper = processes.Helper(
            name="writer",
            module=MODULE,
            arguments=(str(self._store),),
            directory=self._store,
            socket=names.socket_name(socket.gethostname()),
        )
        return processes.start(helper, seconds=_START_SECONDS)

    def _have_listener(self, link: socket.socket) -> None:
        if self._listened is link:
            return
        name = "argosy-writer-answers"
        threading.Thread(target=self._listen, args=(link,), name=name, daemon=True).start()
        self._listened = link

    def _listen(self, link: socket.socket) -> None:
        """Until there is no job left, or no writer."""
        is_done, silent_seconds = False, 0.0
        try:
            while not is_done:
                silent_seconds = self._wait_answer(link)
                answer = self._received(link) if not silent_seconds else None
                if answer is None:
                    break
                self._hear(answer)
                is_done = self._is_done(link)
        finally:
            if not is_done:
                self._lose(link, silent_seconds)

    def _wait_answer(self, link: socket.socket) -> float:
        """Until the writer says something or has gone; the seconds for which it said nothing, if they are more than any of its jobs may take, or it does not answer."""
        heard_at = time.monotonic()
        was_killed = False
        while True:
            try:
                link.recv(1, socket.MSG_PEEK)
                return 0.0
            except BlockingIOError:
                with self._lock:
                    own = [one.seconds for one in self._jobs.values() if one.link is link]
                seconds = time.monotonic() - heard_at
                is_late = was_killed or seconds >= max(own, default=0.0)
                if not is_late and ask(self._store, _ANSWER_SECONDS) is None:
                    # Its end is heard here, after what it has said before.
                    was_killed = end_hung(self._store) == self._writer_pid
                    is_late = not was_killed
                if is_late:
                    _shut(link)
                    return time.monotonic() - heard_at
            except OSError:
                return 0.0  # closed here

    def _is_done(self, link: socket.socket) -> bool:
        """Whether all jobs of a connection are over; nobody listens to it from here on, then."""
        with self._lock:
            is_done = not any(one.link is link for one in self._jobs.values())
            if is_done and self._listened is link:
                self._listened = None
            return is_done

    def _received(self, link: socket.socket) -> Answer | None:
        try:
            return messages.receive_answer(link)
        except (OSError, ProtocolError):
            return None  # closed here, or nonsense: either way there is no writer any more

    def _lose(self, link: socket.socket, silent_seconds: float) -> None:
        """The connection has ended, maybe as nothing came for so long: so have the jobs that were not."""
        with self._lock:
            if self._listened is link:
                self._listened = None
            if self._link is link:
                self._link = None
            link.close()
            left = {number: one for number, one in self._jobs.items() if one.link is link}
            for number in left:
                del self._jobs[number]
        what = f"the writer process {self._writer_pid} has ended in the middle of a save"
        fix = _SAVE_AGAIN
        if silent_seconds or self._is_given_up:
            says = f"has said nothing for {silent_seconds:.0f} s" if silent_seconds else "hangs"
            what = f"the writer process {self._writer_pid} {says} in the middle of a save"
            fix = _mend(self._writer_pid)
        for number, one in left.items():
            _tell(one, Failed(number=number, kind=LOST, what=what, fix=fix))
            one.accepted.set()

    def _hear(self, answer: Answer) -> None:
        if isinstance(answer, (Welcome, Doing)):
            return
        with self._lock:
            known = self._jobs.get(answer.number)
            if isinstance(answer, (Durable, Failed)):
                self._jobs.pop(answer.number, None)
        if known is None:
            return
        if isinstance(answer, Accepted):
            known.accepted.set()
        else:
            _tell(known, answer)


def ask(store: Path, seconds: float = _ASK_SECONDS) -> list[tuple[int, int, int]] | None:
    """Of all that the writer of this host is writing there, whoever has asked for it: the step, the bytes that are on their way, and all of them. None when there is one that does not answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            if _greet(link, store.resolve(), seconds):
                messages.send(link, Ask())
                answer = messages.receive_answer(link)
                return answer.jobs if isinstance(answer, Doing) else []
        except TimeoutError:
            return None
        except (OSError, ProtocolError):
            pass
    return []


def end_hung(store: Path) -> int:
    """Kill the writer of this host, which does not answer, so that others get what it holds; its number, 0 when it cannot be ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        try:
            sockets.connect_within(link, store, names.socket_name(socket.gethostname()), 0.0)
            pid = sockets.pid_of(link)
            with open(f"/proc/{pid}/cmdline", "rb") as words:
                if MODULE.encode() not in words.read().split(b"\0"):
                    return 0
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return 0
    _LOG.warning("the writer process %d of %s does not answer: it was killed", pid, store)
    return pid


def _greet(link: socket.socket, store: Path, seconds: float) -> int:
    """Connect; the number of the process that answers, 0 when it is of another version."""
    sockets.connect_within(link, store, names.socket_name(socket.gethostname()), seconds)
    messages.send(link, Hello(version=messages.VERSION, pid=os.getpid()))
    answer = messages.receive_answer(link)
    if isinstance(answer, Welcome) and answer.version == messages.VERSION:
        return answer.pid
    return 0


class _Sent(NamedTuple):
    """A job on its way."""

    link: socket.socket
    told: Told
    accepted: threading.Event
    seconds: float
    """For which the writer may say nothing."""


def _patience(job: Job) -> float:
    """It gives up by itself what it does not come to write in time, and then what others do not come to vote for."""
    waits = 0.0 if job.size == 1 else min(job.seconds, job.deadline_seconds)
    return job.deadline_seconds + waits + _LATE_SECONDS


def _look_after(link: socket.socket, seconds: float) -> None:
    """Let whoever listens look at the clock that often at least."""
    whole = struct.pack("ll", max(1, int(min(seconds, _START_SECONDS))), 0)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, whole)


def _mend(pid: int) -> str:
    ends = f"`kill -9 {pid}`" if pid else "its end"
    return f"look at the disk (dmesg); {ends} gives back what it holds, and the next save starts another one"


def _tell(one: _Sent, answer: Progress | Durable | Failed) -> None:
    """What a listener raises is its own affair: the writer goes on."""
    try:
        one.told(answer)
    except Exception:  # noqa: BLE001 - whatever a listener of the user raises
        _LOG.exception("whoever was told what became of a save has failed")


def _shut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _has_ended(link: socket.socket) -> bool:
    """Whether the other side of a connection on which nothing is expected has gone."""
    try:
        return not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def error_of(failed: Failed) -> ArgosyError:
    """The error that the writer met, as this process raises it."""
    if failed.kind == LOST:
        return WriterLost(failed.what, fix=failed.fix)
    if failed.kind == boards.PartnerLost.__name__:
        return boards.PartnerLost(failed.rank)
    if failed.kind == boards.PartnerFailed.__name__:
        return boards.PartnerFailed(failed.what, fix=failed.fix)
    return processes.error_named(failed.kind, failed.what, failed.fix)


def wait_gone(store: Path, seconds: float) -> bool:
    """Whether the writer of this host ends within a time; for tests and for who removes a store."""
    deadline = time.monotonic() + seconds
    name = names.socket_name(socket.gethostname())
    while (store / name).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
