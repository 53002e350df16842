"""A planned save on its way to the disk beside training: by the writer process, or by a thread of this one where there is none, with a handle for whoever asked.

The bytes lie in memory that nobody writes until the save is over: a snapshot (background.py) or what was lent (lending.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import msgspec

from argosy.checkpoint import manifests, together, votes
from argosy.checkpoint.blocks import THREADS
from argosy.checkpoint.boards import Group
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.handles import SaveHandle, Stage
from argosy.checkpoint.saving import Prepared
from argosy.checkpoint.slots import SnapshotSlot
from argosy.checkpoint.snapshots import Mode
from argosy.checkpoint.sources import Source
from argosy.checkpoint.together import Settings
from argosy.checkpoint.writer import client
from argosy.checkpoint.writer.client import WriterAbsent, WriterClient, WriterLost
from argosy.checkpoint.writer.messages import Durable, Failed, Job, Lent, Progress, Staged
from argosy.checkpoint.writer.pacing import Pace, Rate
from argosy.errors import ConfigError

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

    def __post_init__(self) -> None:
        if self.snapshot not in get_args(Mode):
            raise ConfigError(
                f"snapshot = {self.snapshot!r}", fix=f"use one of {', '.join(get_args(Mode))}"
            )
        if self.threads < 1:
            raise ConfigError(f"threads = {self.threads}", fix="use a number from 1 up")
        if not self.bytes_per_second >= 0:
            raise ConfigError(
                f"bytes_per_second = {self.bytes_per_second}",
                fix="use a number above 0, or 0 for as fast as the disk takes it",
            )
        if not self.deadline_seconds > 0:
            raise ConfigError(
                f"deadline_seconds = {self.deadline_seconds}", fix="use seconds above 0"
            )


def paced(
    settings: Settings, writing: Writing, rate: Rate, tell: Callable[[int], None]
) -> Settings:
    """For one save that this process writes itself, from now on: no faster and no longer than it may."""
    pace = Pace(rate, writing.bytes_per_second, writing.deadline_seconds, tell)
    return msgspec.structs.replace(settings, pace=pace)


class Delivery:
    """One save on its way."""

    prepared: Prepared

    def __init__(self, handle: SaveHandle) -> None:
        self.handle = handle

    @property
    def step(self) -> int:
        """Which it is."""
        return self.handle.step

    @property
    def waited_seconds(self) -> float:
        """How long training has waited for it."""
        return 0.0

    def planned(self, prepared: Prepared) -> None:
        """What is written is known now."""
        self.prepared = prepared
        self.handle.total_bytes = sum(duty.stop - duty.start for duty in prepared.duties)


class Deliveries:
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
        self.writer = WriterClient(store)
        self.group = group
        self._settings = settings
        self._writing = writing
        self._told = told
        self._watched = watched
        self._rate = Rate()

    def hand_over(
        self,
        one: Delivery,
        source: Staged | Lent,
        descriptors: Sequence[int] = (),
        holds: Sequence[int] = (),
        slot: SnapshotSlot | None = None,
    ) -> bool:
        """Give it to the writer process, which finishes it whatever happens to this one; False when there is none.

        `descriptors` are the memory that is lent, `holds` what others see as long as it is.
        """
        if self._settings.files is not FILES:
            return False
        staging, outline, group = one.prepared.staging, one.prepared.outline, self.group
        job = Job(
            number=self.writer.next_number(),
            source=source,
            duties=one.prepared.duties,
            outline=outline,
            store=str(staging.store.path.resolve()),
            staging=staging.name,
            rank=group.rank,
            size=group.size,
            session=group.session,
            seconds=group.seconds,
            threads=self._settings.threads,
            bytes_per_second=self._writing.bytes_per_second,
            deadline_seconds=self._writing.deadline_seconds,
            is_incremental=self._settings.is_incremental,
        )
        lock = staging.store.lend_lock(staging.name)
        # The store is free before another process can hold what was lent: it saves next.
        given = [*descriptors, *([] if lock is None else [lock]), *holds]
        try:
            self.writer.submit(job, given, lambda answer: self._hear(one, answer), slot)
        except WriterAbsent as failure:
            staging.store.lock_came_back(staging.name)
            _LOG.warning("step %d is written by this process: %s", one.step, failure)
            return False
        except WriterLost:
            staging.store.lock_came_back(staging.name)
            raise
        self._advance(one.handle, "staged")
        return True

    def write_here(
        self,
        one: Delivery,
        source: Source,
        *,
        confirm: Callable[[], None] | None = None,
        is_waited_for: bool = False,
    ) -> int | None:
        """By this thread; the manifest's CRC from the one that commits. `is_waited_for`: training stands still meanwhile."""
        writing = self._writing
        if is_waited_for:
            writing = msgspec.structs.replace(writing, bytes_per_second=0.0)
        settings = paced(
            self._settings, writing, self._rate, lambda num_bytes: self._note(one, num_bytes)
        )
        prepared = one.prepared
        together.note(prepared.staging.path, votes.WRITES, self.group.rank, self.group.size)
        data = together.write(
            prepared.staging,
            prepared.outline,
            prepared.duties,
            source,
            self.group,
            msgspec.structs.replace(settings, confirm=confirm),
        )
        return None if data is None else manifests.crc_of(data)

    def durable(self, one: Delivery, crc32c: int | None, **measured: float) -> None:
        """It is committed."""
        self._advance(one.handle, "staged")
        self._advance(one.handle, "durable", crc32c, **measured)

    def failed(self, one: Delivery, failure: BaseException) -> None:
        """It is given up; whoever waits for it is told."""
        handle = one.handle
        if handle.claim("failed"):
            handle.error = failure
            try:
                self._told(handle, "failed", None)
            finally:
                handle.advance("failed")

    def _note(self, one: Delivery, num_bytes: int) -> None:
        """So much is on its way to the disk."""
        one.handle.written_bytes = num_bytes
        if self._watched is not None:
            self._watched(one.handle)

    def _hear(self, one: Delivery, answer: Progress | Durable | Failed) -> None:
        """In the thread that listens to the writer."""
        staging = one.prepared.staging
        if isinstance(answer, Progress):
            self._note(one, answer.num_bytes)
            return
        if isinstance(answer, Durable):
            staging.store.lock_came_back(staging.name)
            staging.leave()
            one.handle.written_bytes = one.handle.total_bytes
            self.durable(
                one,
                answer.crc32c,
                writer_seconds=answer.seconds,
                writer_cpu_seconds=answer.cpu_seconds,
                gate_seconds=one.waited_seconds,
            )
        else:
            failure = client.error_of(answer)
            if isinstance(failure, WriterLost):
                together.give_up(staging, self.group, failure)
            else:
                staging.leave()
            # A writer that still lives finds its directory gone, and commits nothing.
            staging.store.lock_came_back(staging.name)
            self.failed(one, failure)

    def _advance(
        self, handle: SaveHandle, stage: Stage, crc32c: int | None = None, **measured: float
    ) -> None:
        """Tell first: whoever waits for the handle finds everything else done."""
        if handle.claim(stage):
            try:
                self._told(handle, stage, crc32c)
            finally:
                handle.advance(stage, **measured)
