"""Saves of a trainer: beside training while a version is pinned, on a stop, at the end, before a failure.

The first of the living ranks saves; the others need not know. A pinned version is not written again until it is saved, so nothing is copied and no step waits: updates go on in other slots.
The writer process reads what is pinned, and finishes when the rank that asked has died; until then it has the rank's hold, and no other rank saves.
What is saved is a checkpoint like any other (storedstate.py). Called by parts.py at the beginning of each turn.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from argosy.checkpoint import names
from argosy.checkpoint.boards import Group
from argosy.checkpoint.checkpointer import Checkpointer
from argosy.checkpoint.events import Event
from argosy.checkpoint.intervals import Failures, Interval
from argosy.checkpoint.lending import Loan
from argosy.checkpoint.loading import Loaded
from argosy.checkpoint.peers import notes
from argosy.checkpoint.peers.settings import Peers
from argosy.checkpoint.schedules import Schedule
from argosy.checkpoint.sessions import Record
from argosy.checkpoint.tiers import claims
from argosy.checkpoint.tiers.buckets import Bucket
from argosy.checkpoint.tiers.settings import Objects
from argosy.checkpoint.writer.client import WriterLost
from argosy.checkpoint.writer.watch import HURRIED_SECONDS, WriterWatch
from argosy.errors import ArgosyError, GenerationChanged, TimedOut
from argosy.move.versions import Versions
from argosy.train.checkpoints import Checkpoints
from argosy.train.lineage import Lineage
from argosy.train.memories import Hold, Memories, Version
from argosy.train.storedstate import KEY, StoredVersion

_LOG = logging.getLogger("argosy.train")
_NICE = 10
_WAIT_SECONDS = 20.0
_TURN_SECONDS = 1.0
_LOOK_SECONDS = 0.02
_PINNED = "saves pin a version: updates go on in other memory, nothing is copied"
_COPIED = "saves are copied first: without recovery there is one version of the state"
FOLDER = "checkpoints"
"""In a run's directory."""


Stored = Callable[[Version], StoredVersion]
"""A version as a part of a checkpoint; asked only while the turn that begins with it is under way."""


class Saver:
    """The saves of one process."""

    def __init__(
        self,
        run: Any,
        policy: Checkpoints | None,
        state: Versions,
        owner: int,
        memories: Memories,
        stored: Stored,
        attachments: Mapping[str, bytes],
    ) -> None:
        """`owner` is the number that pins of saves have in the whole run; `attachments` lie beside the data of each."""
        directory, resumed = Path(run.directory), run.resume_from
        self.path = directory / FOLDER
        self._policy = policy
        self._state = state
        self._memories = memories
        self._stored = stored
        self._attachments = attachments
        kept = policy or Checkpoints()
        peers = None if kept.peers is None else notes.note(kept.peers, directory)
        self.checkpointer = Checkpointer(
            self.path,
            run=run.name,
            group=Group(0, 1),
            keep=kept.keep,
            writing=kept.writing,
            objects=kept.objects,
            peers=peers,
            listener=self._hear,
        )
        self.listener: Callable[[Event], None] | None = None
        """Hears what becomes of saves, in whatever thread."""
        # A rank that dies is replaced, and costs no work: the session is the run's, not the checkpointer's.
        self.checkpointer.session = None
        # The trainer tells its run, or where there is none the person.
        self.checkpointer.reports.tells_run = False
        self._record = Record(self.path, earlier=resumed and Path(resumed) / FOLDER)
        self._is_over = False
        self._lineage = Lineage(self.path)
        self._schedule = Schedule(Interval(Failures(self._record.read())), Group(0, 1))
        self._owner = owner
        self._most_seconds = kept.writing.deadline_seconds
        self._began_at = time.monotonic()
        self._last: int | None = None
        self._thread: threading.Thread | None = None
        self._stuck: set[int] = set()
        """Versions that a writer process which was given up may be reading."""
        self._turns = self._turns_before = 0
        """Begun here, in all and up to the save that is under way."""
        _LOG.info("%s", _PINNED if memories.is_rotating else _COPIED)

    def tend(self, step: int, is_first: Callable[[], bool]) -> None:
        """At the beginning of a turn: begin a save if it is time, this is the rank to do it, and none is under way."""
        if not self._turns:
            self._lineage.begin(step, self.checkpointer.steps())
        self._turns += 1
        if self._policy is not None and step and self._is_due(step) and is_first():
            self._begin()

    def begin(self) -> None:
        """Begin a save of the committed version, whatever is due; nothing when one is under way."""
        if not self.is_saving:
            self._begin()

    @property
    def is_saving(self) -> bool:
        """Whether this process is at it."""
        is_lending = self._thread is not None and self._thread.is_alive()
        return is_lending or self.checkpointer.is_saving

    def save(self) -> Path:
        """Save the committed version now; where it is. One that is there already is left as it is, and a save of another process is waited for."""
        watch = self._wait_watching()
        deadline = time.monotonic() + self._most_seconds
        while (taken := self._take(is_last=True)) is None:
            watch.look()
            if time.monotonic() >= deadline:
                raise TimedOut(
                    f"another process has been saving for {self._most_seconds:.0f} s",
                    fix="look at the disk; `argosy stacks` shows where it is",
                )
            time.sleep(_LOOK_SECONDS)
        return self._save_taken(*taken)

    def end(self) -> None:
        """All that was to be saved is: that the run ends from here on is no failure. What is to be uploaded is waited for."""
        self.wait()
        self.checkpointer.close()
        self._is_over = True
        self._record.end()

    def wait(self) -> None:
        """Until no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def save_once(
        self, is_turn: Callable[[], bool], is_whole: Callable[[Version], bool]
    ) -> Path | None:
        """One of the ranks that stop saves the committed version; the others wait for it, and take its place if it ends before.

        Whose turn it is may be seen differently by ranks that are between two memberships: after a while anybody's it is.
        A version that is not whole yet is left for now.
        """
        watch = self._wait_watching()
        began = busy_at = time.monotonic()
        while (step := self._committed()) and time.monotonic() - busy_at < _WAIT_SECONDS:
            if self._lineage.has(step):
                self.end()
                return self.path / names.step_name(step)
            if is_turn() or time.monotonic() - began > _TURN_SECONDS:
                taken = self._take(is_last=True)
                if taken is not None and is_whole(taken[1]):
                    return self._save_taken(*taken)
                if taken is not None:
                    self._let_go(taken[0], taken[2])
            now = time.monotonic()
            if self._state.pins().get(self._owner) and now < began + self._most_seconds:
                # Somebody saves, or the writer process for one that has died.
                busy_at = now
                watch.look()
            time.sleep(_LOOK_SECONDS)
        return None

    def _wait_watching(self) -> WriterWatch:
        """Until no save is under way here; a writer process that hangs is not waited for."""
        watch = WriterWatch(self.path, self.checkpointer.reports, HURRIED_SECONDS)
        while self.is_saving:
            time.sleep(_LOOK_SECONDS)
            watch.look()
            if watch.is_deaf:
                self.checkpointer.give_writer_up()
        self.wait()
        return watch

    def _take(self, *, is_last: bool = False) -> tuple[int, Version, Hold | None] | None:
        """Pin the committed version to save it; None while another process is at a save, or the others have just gone on.

        A last save goes around a writer process that was given up: no update needs the slots of both. What that one may be reading is read beside it, without a hold.
        """
        self._release_left()
        stuck = self._stuck if is_last else set()
        if {version for version, _ in self._state.pins().get(self._owner, [])} - stuck:
            return None
        version, slot = self._state.current()
        found = self._memories.version(slot)
        hold = found.hold()  # before the pin: one that nobody holds was left by a dead process
        if hold is None and version not in stuck:
            return None
        try:
            self._state.pin(version, owner=self._owner)
        except GenerationChanged:
            if hold is not None:
                hold.release()
            return None
        return version, found, hold

    def _save_taken(self, version: int, found: Version, hold: Hold | None) -> Path:
        try:
            path = self._write(self._stored(found))
        finally:
            self._leave(version, hold)
        self.end()
        return path

    def _committed(self) -> int:
        """Steps that are committed; others may go on meanwhile."""
        return int(self._memories.version(self._state.current()[1]).ledger["step"])

    def _is_due(self, step: int) -> bool:
        if self.is_saving:
            return False
        if self._lineage.is_taken(step):
            return False  # the next step has a name of its own
        policy = self._policy
        assert policy is not None
        if policy.every is not None:
            return step // policy.every > self._newest() // policy.every
        if policy.seconds is not None:
            return time.monotonic() - self._began_at >= policy.seconds
        return self._schedule.is_due(step)

    def _newest(self) -> int:
        """The newest step that was saved, or tried to."""
        if self._last is None:
            self._last = max(filter(self._lineage.has, self.checkpointer.steps()), default=0)
        return self._last

    def _begin(self) -> None:
        taken = self._take()
        if taken is None:
            return  # the next turn is soon enough
        version, found, hold = taken
        assert hold is not None
        stored = self._stored(found)
        self._last, self._began_at = stored.step, time.monotonic()
        self._turns_before = self._turns
        self._schedule.requested(stored.step)
        if self._memories.is_rotating:
            loan = Loan((*found.memories(), self._memories.weights.memory), (hold.descriptor,))
            # Not a daemon: a program that ends now waits for it.
            self._thread = threading.Thread(
                target=self._save_pinned, args=(version, stored, hold, loan), name="argosy-save"
            )
            self._thread.start()
            return
        try:
            self._said_when_failed(stored, self._save_copied)
        finally:
            self._let_go(version, hold)

    def _release_left(self) -> None:
        """Give back what a process that died had pinned."""
        for version, slot in self._state.pins().get(self._owner, []):
            hold = self._memories.version(slot).hold()
            if hold is not None:
                self._let_go(version, hold)

    def _leave(self, version: int, hold: Hold | None) -> None:
        """The next save may be another rank's: it begins when the pin is gone, and must not find the store locked."""
        try:
            self.checkpointer.unlock()
        finally:
            self._let_go(version, hold)

    def _let_go(self, version: int, hold: Hold | None) -> None:
        """What a writer process that is not known to have ended may be reading stays pinned until nobody holds it."""
        if hold is None:
            return  # it has the hold
        if hold.is_shared:
            self._stuck.add(version)
        else:
            self._state.unpin(version, owner=self._owner)
        hold.release()

    def _save_pinned(self, version: int, stored: StoredVersion, hold: Hold, loan: Loan) -> None:
        """In a thread of its own, which waits for the writer process while updates go on in other slots."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            self._said_when_failed(stored, partial(self._lend, loan, hold))
        finally:
            self._leave(version, hold)
        seconds = time.monotonic() - self._began_at
        self._schedule.saved(self._slowed_by(seconds))
        self._schedule.became_durable(seconds)

    def _slowed_by(self, seconds: float) -> float:
        """What a save that took so long has cost training: the time that the steps made meanwhile have taken beyond the usual."""
        usual = self._schedule.interval.statistics()["step_seconds"]
        made = self._turns - self._turns_before
        # One more was under way.
        return max(0.0, seconds - (made + 1) * usual) if usual and made else 0.0

    def _save_copied(self, stored: StoredVersion) -> None:
        """Where every version is the same memory: copied now, written by the writer process."""
        handle = self.checkpointer.save(
            stored.step,
            {KEY: stored},
            metrics=stored.metrics,
            attachments=self._attachments,
            streams=False,
            wait=False,
        )
        # What becomes of it is said when it is known: raised by the next save it would cost that one.
        handle.is_reported = True
        self._schedule.saved(time.monotonic() - self._began_at)

    def _said_when_failed(
        self, stored: StoredVersion, save: Callable[[StoredVersion], object]
    ) -> None:
        """What goes wrong with a save is said, and training goes on."""
        try:
            save(stored)
        except (ArgosyError, OSError) as failure:
            _LOG.warning("step %d was not saved, training goes on: %s", stored.step, failure)

    def _hear(self, event: Event) -> None:
        # Before the step is there: a session that dies right after it has saved something, and was lost.
        if event.what in ("requested", "durable") and not self._is_over:
            self._record.note()
        if self.listener is not None:
            self.listener(event)

    def _lend(self, loan: Loan, hold: Hold, stored: StoredVersion) -> None:
        if self._lineage.has(stored.step):
            return
        handle = self.checkpointer.save_lent(
            stored.step,
            {KEY: stored},
            loan,
            metrics=stored.metrics,
            attachments=self._attachments,
        )
        try:
            handle.wait()
        except WriterLost:
            hold.is_shared = True
            raise

    def _write(self, stored: StoredVersion) -> Path:
        if not self._lineage.has(stored.step):
            self.checkpointer.save(
                stored.step,
                {KEY: stored},
                metrics=stored.metrics,
                attachments=self._attachments,
                streams=False,
            )
        return self.path / names.step_name(stored.step)


def restore(
    stored: StoredVersion, own: Path, directories: Iterable[tuple[Path, Checkpoints]]
) -> Loaded | None:
    """Fill a version from the newest good checkpoint of the first of these runs' directories, with the tiers they went to, that has one.

    Called when nothing of the run is in memory: a session that has not ended in its `own` directory was lost.
    """
    loaded = _load(stored, own, directories)
    Record(own / FOLDER).resume()
    return loaded


def _load(
    stored: StoredVersion, own: Path, directories: Iterable[tuple[Path, Checkpoints]]
) -> Loaded | None:
    for directory, policy in directories:
        with Checkpointer(
            directory / FOLDER,
            group=Group(0, 1),
            objects=policy.objects,
            peers=_peers_of(directory, policy),
        ) as checkpointer:
            loaded = checkpointer.load({KEY: stored}, streams=False)
        if loaded is not None:
            if policy.objects is not None:
                _inherit(policy.objects, directory / FOLDER, own / FOLDER)
            return loaded
    return None


def _inherit(objects: Objects, old: Path, new: Path) -> None:
    """What cannot be asked now is no reason not to train: uploads will say so."""
    try:
        claims.inherit(Bucket(objects.url, objects.options), old, new)
    except ArgosyError as failure:
        _LOG.warning("%s: %s", objects.url, failure.what)


def _peers_of(directory: Path, policy: Checkpoints) -> Peers | None:
    """Those that have checkpoints of this very run: whose they are is what it has noted itself, where they are now is said by the program."""
    known = None if policy.peers is None else notes.noted(directory)
    if known is None or policy.peers is None:
        return None
    return msgspec.structs.replace(policy.peers, run=policy.peers.run or known.run)
