"""Saves that go on beside training: a snapshot into one of two slots, then the writer process, with a handle for whoever asked.

Two slots take turns, so that a copy that is cut off leaves the one before whole; a third save waits for the first. Where there is no memory for a snapshot
the state is written from where it lies, behind the same gate, and where no writer process can be had a thread of this one writes. Called by the checkpointer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from argosy.checkpoint import slots, together
from argosy.checkpoint.boards import PartnerFailed, PartnerLost
from argosy.checkpoint.deliveries import Deliveries, Delivery
from argosy.checkpoint.handles import SaveHandle
from argosy.checkpoint.saving import Prepared
from argosy.checkpoint.slots import SnapshotSlot
from argosy.checkpoint.snapshots import Copy, Gates
from argosy.checkpoint.sources import StagedSource
from argosy.checkpoint.writer.messages import Staged
from argosy.errors import NoRoom

_LOG = logging.getLogger("argosy.checkpoint")


class Background:
    """The saves of one checkpointer that go on beside training."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
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
        task = _Task(prepare, handle, copy, place)
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
                together.give_up(task.prepared.staging, self._deliveries.group, failure)
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
            together.give_up(prepared.staging, self._deliveries.group, failure)
            raise

    @property
    def is_saving(self) -> bool:
        """Whether a save goes on."""
        return any(not handle.is_done for handle in self._handles)

    def wait_copied(self) -> None:
        """Until nothing of the state is being read any more."""
        self._gates.wait()

    def raise_failed(self) -> None:
        """Raise the first error that nobody was told yet."""
        failed = [one for one in self._handles if _is_news(one)]
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
        self._deliveries.writer.close()
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
                self._deliveries.failed(task, failure)
                return
        try:
            slot = self._slot(task)
            if slot is None:
                task.handle.how = "written in place"
                self._write_in_place(task)
                return
            slot.begin(task.step)
            task.copy.run(slot.address)
            sequence = slot.finish()
            task.copy.end()
            self._hand_over(task, slot, sequence)
        except BaseException as failure:  # noqa: BLE001
            # Whatever it is belongs to whoever waits for the save; the thread has nobody to tell.
            task.copy.end()
            together.give_up(task.prepared.staging, self._deliveries.group, failure)
            self._deliveries.failed(task, failure)
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
            self._deliveries.writer.forget(task.place)
            self._slots[task.place] = None
            slot.close()
        try:
            slot = self._slots[task.place] = SnapshotSlot.create(task.num_bytes)
        except NoRoom as failure:
            _LOG.warning("step %d is written from where it lies: %s", task.step, failure)
        return slot if self._slots[task.place] is slot else None

    def _hand_over(self, task: _Task, slot: SnapshotSlot, sequence: int) -> None:
        told = Staged(memory=task.place, sequence=sequence, places=task.places)
        if self._deliveries.hand_over(task, told, slot=slot):
            return
        prepared = task.prepared
        source = StagedSource(prepared.outline.image, prepared.duties, task.places, slot.address)
        self._deliveries.durable(task, self._deliveries.write_here(task, source))

    def _write_in_place(self, task: _Task) -> None:
        """From where it lies: training waits for it behind the gate."""
        copy = task.copy
        assert copy.source is not None
        crc32c = self._deliveries.write_here(
            task, copy.source, confirm=copy.check, is_waited_for=True
        )
        copy.end()
        self._deliveries.durable(task, crc32c)


def _is_news(handle: SaveHandle) -> bool:
    """Not of another rank, which raises it itself: else failures would follow each other from rank to rank."""
    error = handle.error
    is_own = not isinstance(error, PartnerFailed) or isinstance(error, PartnerLost)
    return error is not None and not handle.is_reported and is_own


class _Task(Delivery):
    """One save that has a snapshot."""

    places: list[int]
    num_bytes: int

    def __init__(
        self, prepare: Callable[[], Prepared], handle: SaveHandle, copy: Copy, place: int
    ) -> None:
        super().__init__(handle)
        self.prepare = prepare
        self.copy = copy
        self.place = place
        self.may_begin = threading.Event()

    @property
    def waited_seconds(self) -> float:
        """By the gate."""
        return self.copy.waited_seconds

    def planned(self, prepared: Prepared) -> None:
        """What is copied whither is known now."""
        super().planned(prepared)
        self.places, self.num_bytes = slots.places_of(prepared.duties)
        self.copy.plan(prepared.outline.image, prepared.book.entries, prepared.duties, self.places)
