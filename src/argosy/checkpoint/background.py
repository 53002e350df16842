"""Saves that go on beside training: a snapshot into one of two slots, then the writer process, with a handle for whoever asked.

Two slots take turns, so that a copy that is cut off leaves the one before whole; a third save waits for the first. Where there is no memory for a snapshot
the state is written from where it lies, behind the same gate, and where no writer process can be had a thread of this one writes. Called by the checkpointer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from argosy.checkpoint import manifests, slots, together
from argosy.checkpoint.blocks import THREADS
from argosy.checkpoint.boards import Group
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.handles import SaveHandle, Stage
from argosy.checkpoint.saving import Prepared
from argosy.checkpoint.slots import SnapshotSlot
from argosy.checkpoint.snapshots import Copy, Gates, Mode
from argosy.checkpoint.sources import Source, StagedSource
from argosy.checkpoint.together import Settings
from argosy.checkpoint.writer import client
from argosy.checkpoint.writer.client import WriterAbsent, WriterClient, WriterLost
from argosy.checkpoint.writer.messages import Durable, Failed, Job, Progress
from argosy.checkpoint.writer.pacing import Pace, Rate
from argosy.errors import NoRoom

_LOG = logging.getLogger("argosy.checkpoint")
Told = Callable[[SaveHandle, Stage, int | None], None]
"""Hears of each stage that a save comes to, with the manifest's CRC where it is known."""
Watched = Callable[[SaveHandle], None]
"""Hears that more of it is written."""


class Writing(msgspec.Struct, frozen=True, kw_only=True):
    """How saves are taken and written."""

    snapshot: Mode = "auto"
    """Of saves beside training: "blocking" copies everything before `save` returns, whatever guards it."""
    shards: bool = False
    """Each process writes files of its own, for file systems where several cannot write into one."""
    threads: int = THREADS
    bytes_per_second: float = 0.0
    """Of each process that writes: the writer process, for all ranks of a host together, or one that writes for itself. 0: as fast as the disk takes it."""
    deadline_seconds: float = 3600.0
    """After which a save that is not written is given up."""
    files: Files = FILES
    """Every call to the operating system; others than these are written by this process."""


def paced(
    settings: Settings, writing: Writing, rate: Rate, tell: Callable[[int], None]
) -> Settings:
    """For one save that this process writes itself, from now on: no faster and no longer than it may."""
    pace = Pace(rate, writing.bytes_per_second, writing.deadline_seconds, tell)
    return msgspec.structs.replace(settings, pace=pace)


class Background:
    """The saves of one checkpointer that go on beside training."""

    def __init__(
        self,
        store: Path,
        group: Group,
        settings: Settings,
        writing: Writing,
        told: Told,
        watched: Watched | None = None,
    ) -> None:
        self._writer = WriterClient(store)
        self._group = group
        self._settings = settings
        self._writing = writing
        self._told = told
        self._watched = watched
        self._rate = Rate()
        self._gates = Gates()
        self._slots: list[SnapshotSlot | None] = [None, None]
        self._users: list[SaveHandle | None] = [None, None]
        self._next = 0
        self._making = threading.Lock()
        self._thread: threading.Thread | None = None
        self._handles: list[SaveHandle] = []
        self._said = ""

    def save(
        self,
        prepare: Callable[[], Prepared],
        copy: Copy,
        handle: SaveHandle,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Take a snapshot and have it written; when this returns everything but what an optimizer's step changes may change.

        Of a state that was captured nothing more is done here than to begin.
        """
        place = self._next
        self._wait_free(place)
        task = _Task(prepare, handle, copy, place, self._watched)
        if not copy.is_captured:
            self._plan(task)
        self._next = 1 - place
        handle.how = copy.how
        self._say_how(copy)
        # Not a daemon: a script that ends right after this has its save staged first.
        thread = threading.Thread(target=self._run, args=(task,), name="argosy-snapshot")
        try:
            thread.start()
        except BaseException as failure:
            if not copy.is_captured:
                together.give_up(task.prepared.staging, self._group, failure)
            raise
        self._thread = thread
        self._users[place] = handle
        self._handles.append(handle)
        self._gates.guard(optimizers, copy)
        task.may_begin.set()
        if not copy.is_all_late:
            (copy.is_released if copy.how == "gated" else copy.is_over).wait()

    def _plan(self, task: _Task) -> None:
        """Up to the first byte; what goes wrong leaves nothing behind."""
        prepared = task.prepare()
        try:
            task.planned(prepared)
        except BaseException as failure:
            together.give_up(prepared.staging, self._group, failure)
            raise

    def wait_copied(self) -> None:
        """Until nothing of the state is being read any more."""
        self._gates.wait()

    def raise_failed(self) -> None:
        """Raise the first error that nobody was told yet."""
        failed = [one for one in self._handles if one.error is not None and not one.is_reported]
        self._handles = [one for one in self._handles if not one.is_done or one in failed]
        if failed:
            self._handles.remove(failed[0])
            failed[0].is_reported = True
            assert failed[0].error is not None
            raise failed[0].error

    def wait(self) -> None:
        """Until every save is over; raises the first error that nobody was told yet."""
        for handle in list(self._handles):
            handle.settle()
        self.raise_failed()

    def close(self) -> None:
        """After `wait`: give hooks, memory and the writer back."""
        self._gates.open()
        if self._thread is not None:
            self._thread.join()
        self._writer.close()
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._slots = [None, None]

    def _say_how(self, copy: Copy) -> None:
        if copy.how != self._said:
            self._said = copy.how
            why = (
                "copied while training goes on; the optimizer's next step waits for the rest"
                if copy.how == "gated"
                else "copied before save returns: no optimizer of the state guards it"
            )
            _LOG.info("snapshots are %s: %s", copy.how, why)

    def _wait_free(self, place: int) -> None:
        self._gates.wait()
        user = self._users[place]
        if user is not None and not user.is_done:
            _LOG.info("step %d is still being written: waiting for it", user.step)
            user.settle()  # the next call says what went wrong

    def _run(self, task: _Task) -> None:
        """In a thread: plan what was only captured, copy, hand over; or write here."""
        # Else it would take the interpreter from its maker right now, for as long as it plans.
        task.may_begin.wait()
        if task.copy.is_captured:
            try:
                self._plan(task)
            except BaseException as failure:  # noqa: BLE001
                task.copy.end()
                self._failed(task, failure)
                return
        try:
            slot = self._slot(task)
            if slot is None:
                task.handle.how = "written in place"
                self._write_here(task, task.copy.source)
                return
            slot.begin(task.step)
            task.copy.run(slot.address)
            sequence = slot.finish()
            task.copy.end()
            self._hand_over(task, slot, sequence)
        except BaseException as failure:  # noqa: BLE001
            # Whatever it is belongs to whoever waits for the save; the thread has nobody to tell.
            task.copy.end()
            together.give_up(task.prepared.staging, self._group, failure)
            self._failed(task, failure)
        else:
            self._warm(task)

    def _warm(self, task: _Task) -> None:
        """Take the memory of the second slot before a save needs it: first touches are what costs."""
        with self._making:
            if self._slots[1 - task.place] is None:
                try:
                    self._slots[1 - task.place] = SnapshotSlot.create(task.num_bytes)
                except NoRoom:
                    pass  # said when a save needs it

    def _slot(self, task: _Task) -> SnapshotSlot | None:
        with self._making:
            return self._slot_of(task)

    def _slot_of(self, task: _Task) -> SnapshotSlot | None:
        slot = self._slots[task.place]
        if slot is not None and slot.num_bytes >= task.num_bytes:
            return slot
        if slot is not None:
            self._writer.forget(task.place)
            self._slots[task.place] = None
            slot.close()
        try:
            slot = self._slots[task.place] = SnapshotSlot.create(task.num_bytes)
        except NoRoom as failure:
            _LOG.warning("step %d is written from where it lies: %s", task.step, failure)
        return slot if self._slots[task.place] is slot else None

    def _hand_over(self, task: _Task, slot: SnapshotSlot, sequence: int) -> None:
        prepared, outline = task.prepared, task.prepared.outline
        here = StagedSource(outline.image, prepared.duties, task.places, slot.address)
        if self._settings.files is not FILES:
            self._write_here(task, here)
            return
        job = Job(
            number=self._writer.next_number(),
            memory=task.place,
            sequence=sequence,
            places=task.places,
            duties=prepared.duties,
            outline=outline,
            store=str(prepared.staging.store.path.resolve()),
            staging=prepared.staging.name,
            rank=self._group.rank,
            size=self._group.size,
            session=self._group.session,
            seconds=self._group.seconds,
            threads=self._settings.threads,
            bytes_per_second=self._writing.bytes_per_second,
            deadline_seconds=self._writing.deadline_seconds,
            is_incremental=self._settings.is_incremental,
        )
        lock = prepared.staging.store.lend_lock()
        try:
            self._writer.submit(
                job, task.place, slot, lock, lambda answer: self._hear(task, answer)
            )
        except WriterAbsent as failure:
            _LOG.warning("step %d is written by this process: %s", task.step, failure)
            self._write_here(task, here)
            return
        self._advance(task.handle, "staged")

    def _hear(self, task: _Task, answer: Progress | Durable | Failed) -> None:
        """In the thread that listens to the writer."""
        if isinstance(answer, Progress):
            task.note_written(answer.num_bytes)
        elif isinstance(answer, Durable):
            task.prepared.staging.leave()
            task.handle.written_bytes = task.handle.total_bytes
            self._durable(
                task,
                answer.crc32c,
                writer_seconds=answer.seconds,
                writer_cpu_seconds=answer.cpu_seconds,
                gate_seconds=task.copy.waited_seconds,
            )
        else:
            failure = client.error_of(answer)
            if isinstance(failure, WriterLost):
                together.give_up(task.prepared.staging, self._group, failure)
            else:
                task.prepared.staging.leave()
            self._failed(task, failure)

    def _write_here(self, task: _Task, source: Source | None) -> None:
        prepared = task.prepared
        assert source is not None
        is_in_place = source is task.copy.source
        writing = self._writing
        if is_in_place:
            # Training waits for it behind the gate.
            writing = msgspec.structs.replace(writing, bytes_per_second=0.0)
        settings = paced(self._settings, writing, self._rate, task.note_written)
        data = together.write(
            prepared.staging,
            prepared.outline,
            prepared.duties,
            source,
            self._group,
            msgspec.structs.replace(settings, confirm=task.copy.check if is_in_place else None),
        )
        task.copy.end()
        self._durable(task, None if data is None else manifests.crc_of(data))

    def _durable(self, task: _Task, crc32c: int | None, **measured: float) -> None:
        self._advance(task.handle, "staged")
        self._advance(task.handle, "durable", crc32c, **measured)

    def _advance(
        self, handle: SaveHandle, stage: Stage, crc32c: int | None = None, **measured: float
    ) -> None:
        """Tell first: whoever waits for the handle finds everything else done."""
        if handle.claim(stage):
            try:
                self._told(handle, stage, crc32c)
            finally:
                handle.advance(stage, **measured)

    def _failed(self, task: _Task, failure: BaseException) -> None:
        handle = task.handle
        if handle.claim("failed"):
            handle.error = failure
            try:
                self._told(handle, "failed", None)
            finally:
                handle.advance("failed")


class _Task:
    """One save on its way."""

    prepared: Prepared
    places: list[int]
    num_bytes: int

    def __init__(
        self,
        prepare: Callable[[], Prepared],
        handle: SaveHandle,
        copy: Copy,
        place: int,
        watched: Watched | None,
    ) -> None:
        self.prepare = prepare
        self.handle = handle
        self.copy = copy
        self.place = place
        self.watched = watched
        self.step = handle.step
        self.may_begin = threading.Event()

    def note_written(self, num_bytes: int) -> None:
        """So much is on its way to the disk."""
        self.handle.written_bytes = num_bytes
        if self.watched is not None:
            self.watched(self.handle)

    def planned(self, prepared: Prepared) -> None:
        """What is copied whither is known now."""
        self.prepared = prepared
        self.places, self.num_bytes = slots.places_of(prepared.duties)
        self.handle.total_bytes = sum(duty.stop - duty.start for duty in prepared.duties)
        self.copy.plan(prepared.outline.image, prepared.book.entries, prepared.duties, self.places)
