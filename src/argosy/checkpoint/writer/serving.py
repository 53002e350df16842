"""The writer process's own: ranks come over a socket in the store, give memory and jobs, and hear how it goes.

One thread listens to each rank, another carries out its jobs in their order. A rank that has gone changes nothing about jobs that were accepted. The
process ends when no rank is connected and no job is left, or when nobody comes at all.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback

from argosy.checkpoint import names, sockets
from argosy.checkpoint.boards import PartnerLost
from argosy.checkpoint.slots import SnapshotSlot
from argosy.checkpoint.writer import jobs, messages
from argosy.checkpoint.writer.memories import JobMemory, LentMemory, StagedMemory
from argosy.checkpoint.writer.messages import (
    Accepted,
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
from argosy.checkpoint.writer.pacing import Pace, Rate
from argosy.errors import ArgosyError, ProtocolError

_LONELY_SECONDS = 10.0
_LOOK_SECONDS = 0.1


class Serving:
    """Everything the process does."""

    def __init__(self, listener: socket.socket, store: int) -> None:
        self._listener = listener
        self._store = store
        self._rate = Rate()
        self._doing: dict[str, tuple[int, int, int]] = {}
        """By staging directory and rank: the step of each job that is under way, its bytes by the last news, and all of them."""
        self._has_served = False
        self._own = sockets.inode_of(names.socket_name(socket.gethostname()), store)
        self._threads: list[threading.Thread] = []

    def serve(self) -> None:
        """Until nobody is left."""
        self._listener.settimeout(_LOOK_SECONDS)
        lonely_until = time.monotonic() + _LONELY_SECONDS
        while self._threads or time.monotonic() < lonely_until:
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                alive = [one for one in self._threads if one.is_alive()]
                if self._has_served and not alive:
                    break
                self._threads = alive
                continue
            link.settimeout(None)
            thread = threading.Thread(target=self._attend, args=(link,), daemon=True)
            thread.start()
            self._threads.append(thread)
        # A rank that connects from here on finds the connection closed, and starts another writer.
        self._listener.close()
        name = names.socket_name(socket.gethostname())
        if sockets.inode_of(name, self._store) == self._own:
            sockets.remove(name, self._store)

    def _attend(self, link: socket.socket) -> None:
        with link:
            if not sockets.is_own_user(link) or not _greet(link):
                return
            self._has_served = True
            rank = _Rank(link, self._rate, self._doing)
            try:
                while (said := messages.receive_said(link)) is not None:
                    rank.hear(*said)
            except ProtocolError:
                pass  # the rank sees the connection end
            finally:
                rank.finish()


class _Rank:
    """A connected rank: its memory and its jobs."""

    def __init__(
        self, link: socket.socket, rate: Rate, doing: dict[str, tuple[int, int, int]]
    ) -> None:
        """`doing` is what all ranks' jobs are at."""
        self._link = link
        self._rate = rate
        self._doing = doing
        self._sending = threading.Lock()
        self._has_left = threading.Event()
        self._slots: dict[int, SnapshotSlot] = {}
        self._jobs: queue.SimpleQueue[tuple[Job, JobMemory, list[int]] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def hear(self, said: messages.Said, descriptors: list[int]) -> None:
        """One message."""
        if isinstance(said, Memory) and len(descriptors) == 1:
            old = self._slots.pop(said.number, None)
            if old is not None:
                # The rank makes larger memory only when no job uses the old one.
                old.close()
            self._slots[said.number] = SnapshotSlot(descriptors[0], is_writable=False)
        elif isinstance(said, Job) and self._has_memory(said, descriptors):
            self._accept(said, descriptors)
        elif isinstance(said, Ask) and not descriptors:
            self._say(Doing(jobs=list(self._doing.values())))
        else:
            _close(descriptors)
            raise ProtocolError(f"{type(said).__name__} was not expected")

    def _has_memory(self, job: Job, descriptors: list[int]) -> bool:
        if isinstance(job.source, Staged):
            return job.source.memory in self._slots
        return 0 < job.source.memories <= len(descriptors)

    def _accept(self, job: Job, descriptors: list[int]) -> None:
        memory: JobMemory
        if isinstance(job.source, Staged):
            memory, locks = StagedMemory(job.source, self._slots[job.source.memory]), descriptors
        else:
            lent, locks = descriptors[: job.source.memories], descriptors[job.source.memories :]
            try:
                memory = LentMemory(job.source, lent)
            except ProtocolError:
                _close(locks)
                raise
        jobs.accept(job)
        self._jobs.put((job, memory, locks))
        self._say(Accepted(number=job.number))

    def finish(self) -> None:
        """The rank has gone: carry out what it left, and let its memory go."""
        self._has_left.set()
        self._jobs.put(None)
        self._worker.join()
        for slot in self._slots.values():
            slot.close()

    def _work(self) -> None:
        while (one := self._jobs.get()) is not None:
            job, memory, locks = one
            try:
                answer = self._carry_out(job, memory)
            finally:
                memory.close()
                # The store's lock is held for as long as the job: nobody sweeps its directory away. Who hears of its end finds the store free.
                _close(locks)
            self._say(answer)

    def _carry_out(self, job: Job, memory: JobMemory) -> Durable | Failed:
        begun, cpu = time.monotonic(), time.process_time()
        step, total = job.outline.facts.step, sum(duty.stop - duty.start for duty in job.duties)
        place = f"{job.staging} {job.rank}"

        def tell(num_bytes: int) -> None:
            self._doing[place] = step, num_bytes, total
            self._say(Progress(number=job.number, num_bytes=num_bytes))

        pace = Pace(self._rate, job.bytes_per_second, job.deadline_seconds, tell)
        try:
            crc = jobs.carry_out(job, memory, pace, self._has_left.is_set)
        except ArgosyError as failure:
            kind = type(failure).__name__
            rank = failure.rank if isinstance(failure, PartnerLost) else -1
            what, fix = failure.what, failure.fix
            return Failed(number=job.number, kind=kind, what=what, fix=fix, rank=rank)
        except Exception:  # noqa: BLE001 - the last resort of the process: the rank must hear of it
            return Failed(number=job.number, kind="", what=traceback.format_exc(limit=8))
        finally:
            self._doing.pop(place, None)
        return Durable(
            number=job.number,
            crc32c=crc,
            seconds=time.monotonic() - begun,
            cpu_seconds=time.process_time() - cpu,
        )

    def _say(self, answer: messages.Answer) -> None:
        try:
            with self._sending:
                messages.send(self._link, answer)
        except OSError:
            pass  # the rank is dead; its job is not


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _greet(link: socket.socket) -> bool:
    """Whether it is one of ours; who only looks whether somebody answers goes without a word."""
    try:
        said = messages.receive_said(link)
        if said is None or not isinstance(said[0], Hello):
            return False
        messages.send(link, Welcome(version=messages.VERSION, pid=os.getpid()))
    except (ProtocolError, OSError):
        return False
    return said[0].version == messages.VERSION
