"""The facade: save a state, load the newest good one, look into one. Works in any script, with or without a cluster.

`save` is durable when it returns, or goes on beside training (`wait=False`). `load` takes the newest checkpoint that proves whole and falls back to
older ones, saying so. One `Checkpointer` per process and store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsFloat, overload

import msgspec
import torch

from argosy.checkpoint import (
    commits,
    groups,
    lending,
    manifests,
    names,
    records,
    saving,
    signatures,
)
from argosy.checkpoint.background import Background
from argosy.checkpoint.boards import Group
from argosy.checkpoint.books import Book
from argosy.checkpoint.captures import capture
from argosy.checkpoint.catalogue import Catalogue
from argosy.checkpoint.cleaning import Cleaner
from argosy.checkpoint.commits import Store
from argosy.checkpoint.deliveries import Deliveries, Writing, paced
from argosy.checkpoint.events import Listener, What
from argosy.checkpoint.guards import Guards
from argosy.checkpoint.handles import SaveHandle, Stage
from argosy.checkpoint.intervals import Interval
from argosy.checkpoint.lending import Loan
from argosy.checkpoint.loading import Loaded, Rules, load
from argosy.checkpoint.manifests import Parent
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.peers.joining import Joined
from argosy.checkpoint.peers.settings import Peers
from argosy.checkpoint.records import Facts
from argosy.checkpoint.refusals import Refusals
from argosy.checkpoint.registry import check_state, parts_of
from argosy.checkpoint.reports import Reports
from argosy.checkpoint.retention import Keep
from argosy.checkpoint.schedules import Schedule
from argosy.checkpoint.sessions import Record, Session
from argosy.checkpoint.snapshots import Copy
from argosy.checkpoint.tiers.chain import Chain, Hop
from argosy.checkpoint.tiers.orders import Failed, Uploaded
from argosy.checkpoint.tiers.senders import Senders
from argosy.checkpoint.tiers.settings import Objects
from argosy.checkpoint.tiers.uploader import Uploader
from argosy.checkpoint.together import Settings
from argosy.checkpoint.turns import Turn
from argosy.checkpoint.writer.pacing import Rate
from argosy.checkpoint.writer.watch import PATIENT_SECONDS, WriterWatch
from argosy.errors import (
    ArgosyError,
    CheckpointDamaged,
    ConfigError,
    HomeError,
    NotFoundError,
    TimedOut,
)

_LOG = logging.getLogger("argosy.checkpoint")
_REMEMBERED = 16
"""Steps of which it is known when they were begun, for the events that come long after."""


class Checkpointer:
    """Checkpoints of one run in one directory."""

    # One more than is allowed elsewhere: each is a noun of its own, by name alone, and most scripts give none.
    def __init__(  # noqa: PLR0913
        self,
        directory: Path | str,
        *,
        run: str = "",
        group: Group | None = None,
        keep: Keep | None = None,
        listener: Listener | None = None,
        writing: Writing | None = None,
        objects: Objects | None = None,
        peers: Peers | None = None,
    ) -> None:
        _check_kind("objects", objects, Objects, 'Objects("s3://bucket/prefix")')
        _check_kind("peers", peers, Peers, "Peers(hosts=…, host=…)")
        _check_kind("writing", writing, Writing, 'Writing(snapshot="blocking")')
        self.path = Path(directory)
        self._writing = writing or Writing()
        files = self._files = self._writing.files
        self.catalogue = Catalogue(self.path, files=files)
        self._run = run
        self._group = group or groups.of_process()
        self.reports = Reports(self._group.rank, listener)
        joined = Joined(peers, self._group, run, self.path) if peers is not None else None
        self._joined = joined
        self._chain = Chain(self.catalogue, objects, joined.listing if joined else None)
        self._begun: dict[int, float] = {}
        uploader = copier = None
        if objects is not None and self._group.rank == 0:
            advanced = partial(self.reports.advance, "uploaded")
            hear = partial(self._hear_sent, "uploaded", "upload_failed")
            uploader = Uploader(self.path, run, objects, hear, advanced)
        if joined is not None and joined.is_first:
            advanced = partial(self.reports.advance, "copied")
            hear = partial(self._hear_sent, "copied", "copy_failed")
            copier = Uploader(self.path, run, joined.copying, hear, advanced)
        self._senders = Senders(uploader, copier)
        self.cleaner = Cleaner(self.catalogue, keep, self._senders.held)
        interval = Interval()
        self._schedule = Schedule(interval, self._group)
        self.session: Session | None = Session(Record(self.path), interval.failures)
        """Who has sessions that outlive a process counts their failures himself, and sets this to None."""
        self._store: Store | None = None
        self._parent: Parent | None = None
        self._signing_key = ""
        self._settings = Settings(
            files=files, threads=self._writing.threads, shards=self._writing.shards
        )
        self._rate = Rate()
        self._deliveries: Deliveries | None = None
        self._background: Background | None = None
        self._plans = saving.Plans()

    @overload
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        streams: bool = True,
        wait: Literal[True] = True,
    ) -> Path: ...

    @overload
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        streams: bool = True,
        wait: Literal[False],
    ) -> SaveHandle: ...

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        attachments: Mapping[str, bytes] | None = None,
        streams: bool = True,
        wait: bool = True,
    ) -> Path | SaveHandle:
        """Save a state as a step; when this returns it survives the loss of power. What was there is untouched if it fails.

        `attachments` are small files that lie beside the data, like the config.json that other programs look for. With `wait=False` it goes on beside
        training: the optimizers of the state wait before their next step until it is copied, a writer process does the rest, and what goes wrong is
        raised by the handle or by the next call.
        """
        begun, turn = time.monotonic(), Turn(self._group)
        with turn.telling():
            self._group.met()  # else nobody would hear of a refusal
            step = names.check_step(step)
            if self._background is not None:
                self._background.wait() if wait else self._background.raise_failed()
            check_state(state)
            store = self._opened_store()
            facts = self._requested(step, begun, metrics, attachments, turn)

        def gather() -> Book:
            if wait:
                self.cleaner.wait()
            return self._gathered(state, streams)

        path = self.path / names.step_name(step)
        try:
            if not wait:
                handle = SaveHandle(step, path)
                with turn.telling():
                    self._save_beside(facts, state, streams, gather, handle, turn)
                self._schedule.saved(time.monotonic() - begun)
                return handle
            total = [0]
            settings = paced(
                msgspec.structs.replace(self._settings, begins=partial(total.__setitem__, 0)),
                self._writing,
                self._rate,
                lambda num_bytes: self.reports.advance("written", step, num_bytes, total[0]),
            )
            data = saving.save_together(
                store, facts, gather, self._group, settings, self._plans, turn
            )
        except BaseException as failure:
            self.reports.say_failed(step, begun, failure)
            raise
        crc32c = None if data is None else manifests.crc_of(data)
        # Nobody else would have finished it: it is staged no earlier than it is durable.
        self.reports.say("staged", step, begun)
        self._become_durable(step, crc32c, begun)
        self._schedule.saved(time.monotonic() - begun)
        return path

    def save_lent(
        self,
        step: int,
        state: Mapping[str, Any],
        loan: Loan,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        attachments: Mapping[str, bytes] | None = None,
    ) -> SaveHandle:
        """Save a state from memory that is left as it is until the handle is done: nothing of what was lent is copied, and the writer process does all the rest.

        For one process alone. Whatever goes wrong from here on is raised by the handle alone.
        """
        begun, turn = time.monotonic(), Turn(self._group)
        facts = self._requested(step, begun, metrics, attachments, turn)

        def prepare() -> saving.Prepared:
            self.cleaner.wait()
            gather, group = partial(self._gathered, state, False), self._group
            store = self._opened_store()
            return saving.prepare(store, facts, gather, group, self._settings, self._plans, turn)

        handle = SaveHandle(step, self.path / names.step_name(step))
        handle.is_reported = True
        try:
            lending.lend(self._delivered(), prepare, handle, loan)
        except BaseException as failure:
            self.reports.say_failed(step, begun, failure)
            raise
        return handle

    def _requested(
        self,
        step: int,
        begun: float,
        metrics: Mapping[str, SupportsFloat] | None,
        attachments: Mapping[str, bytes] | None,
        turn: Turn,
    ) -> Facts:
        names.check_step(step)
        self._senders.raise_failed()
        numbers, files = records.finite(metrics or {}), records.attached(attachments or {})
        self.reports.say("requested", step, begun)
        self._schedule.requested(step, turn)
        return Facts(
            step=step,
            run=self._run,
            parent=self._parent,
            world=self._group.size,
            metrics=numbers,
            attachments=files,
            signing_key=self._signing_key,
        )

    def _gathered(self, state: Mapping[str, Any], with_streams: bool) -> Book:
        self._lock()
        book = Book(self._group.rank)
        for part in parts_of(state, with_streams=with_streams).values():
            part.gather(book)
        return book

    def _save_beside(
        self,
        facts: Facts,
        state: Mapping[str, Any],
        streams: bool,
        gather: Callable[[], Book],
        handle: SaveHandle,
        turn: Turn,
    ) -> None:
        """Begin a save that goes on beside training."""
        store = self._opened_store()
        optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        guards = Guards(optimizers if self._writing.snapshot != "blocking" else ())
        captured = None
        try:
            captured = capture(parts_of(state, with_streams=streams), guards, self._group.rank)
            if captured is not None:
                self._lock()
                store.check_absent(facts.step)
                gather = captured.book
        except BaseException as failure:
            if self._group.is_alone:
                raise
            # It is raised where the others are told.
            captured, gather = None, partial(_raise, failure)

        def prepare() -> saving.Prepared:
            group, settings = self._group, self._settings
            return saving.prepare(store, facts, gather, group, settings, self._plans, turn)

        copy = Copy(guards, is_captured=captured is not None)
        self._saves().save(prepare, copy, handle, optimizers)

    def _become_durable(self, step: int, crc32c: int | None, begun: float) -> None:
        """Also in the threads of saves that go on beside training."""
        if crc32c is None:
            data = (self.path / names.step_name(step) / names.MANIFEST).read_bytes()
            crc32c = manifests.crc_of(data)
        self._parent = Parent(step=step, crc32c=crc32c)
        if self.session is not None:
            self.session.note()
        self.reports.say("durable", step, begun)
        self._begun[step] = begun
        for old in list(self._begun)[:-_REMEMBERED]:
            del self._begun[old]
        self._senders.offer(step)
        if self._group.rank == 0:
            self.cleaner.start(lambda: self._store, step)

    def load(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        rules: Rules | None = None,
        streams: bool = True,
    ) -> Loaded | None:
        """Fill a state from the newest good checkpoint, or from the step that is named; None when there is none yet.

        With peers or an object store the newest step of all is taken, from peers' memory before the disk and from the object store last. What cannot
        be used is gone around, with a warning.
        """
        turn = Turn(self._group)
        with turn.telling():
            self._group.met()  # before rank 0 waits for what may take longer than that
            check_state(state)
            _check_kind("rules", rules, Rules, 'Rules(strict="any")')
            step = None if step is None else names.check_step(step)
            if self._background is not None:
                self._background.wait()
            elif self._group.rank == 0:
                watch = WriterWatch(self.path, self.reports, PATIENT_SECONDS)
                commits.wait_finished(self.path, self._writing.deadline_seconds, watch.look)
            return self._load_newest(step, state, rules, streams, turn)

    def _load_newest(
        self,
        step: int | None,
        state: Mapping[str, Any],
        rules: Rules | None,
        streams: bool,
        turn: Turn,
    ) -> Loaded | None:
        is_first = self._group.is_alone or self._group.rank == 0
        seconds = self._writing.deadline_seconds
        hops = self._chain.agreed_hops(step, turn, is_first=is_first, more_seconds=seconds)
        if step is not None and len(hops) == 1:
            loaded = self._load_one(hops[0], state, rules, streams)
            turn.agree(b"", more_seconds=seconds)  # no rank goes on without the others
            return loaded
        refusals = Refusals()
        for hop in hops:
            found: Loaded | None = None
            own: ArgosyError | None = None
            try:
                found = self._load_one(hop, state, rules, streams)
            except (CheckpointDamaged, NotFoundError, ConfigError, HomeError, TimedOut) as failure:
                own = failure
                if isinstance(failure, CheckpointDamaged) and hop.source == "disk":
                    self.catalogue.mark_damaged(hop.step, failure)
            # It counts when every rank has it whole, so that all of them resume from the same step.
            why = turn.first_trouble(own.what if own else "")
            if found is not None and not why:
                found.skipped = refusals.texts
                return found
            refusals.add(hop.step, self._chain.listing_of(hop).where, why, own)
        if refusals.texts:
            raise refusals.error(self.path, step)
        return None

    def open(self, step: int | None = None) -> Opened:
        """A checkpoint to look into; the newest that opens unless told."""
        first: ArgosyError | None = None
        for hop in self._chain.hops(step):
            try:
                return self.catalogue.open(hop.step, self._chain.listing_of(hop))
            except ArgosyError as failure:
                first = first or failure
        raise first or NotFoundError(f"{self.path} has no checkpoint", fix="save one first")

    def sign_with(self, private_key: Path | str) -> None:
        """Sign every save with the Ed25519 key in this PEM file; the process that commits reads it."""
        signatures.sign(
            b"", Path(private_key)
        )  # a key that cannot be used is refused here, not by the first save
        self._signing_key = str(Path(private_key).absolute())

    def trust(self, *public_keys: Path | str) -> None:
        """From now on open and load only what was signed by one of these keys."""
        self.catalogue.trust([Path(one) for one in public_keys])

    def is_due(self, step: int) -> bool:
        """Whether it is time to save, by what saves have cost and how often something fails; all ranks ask at every step."""
        return self._schedule.is_due(names.check_step(step))

    def statistics(self) -> dict[str, float]:
        """What `is_due` goes by; rank 0's counts. `failures` are earlier sessions that saved here and did not end: known from the first save on."""
        return self._schedule.interval.statistics()

    def steps(self) -> list[int]:
        """Saved steps, rising."""
        return self.catalogue.steps()

    def wait_uploaded(self, timeout: float | None = None) -> None:
        """Until what is durable has been uploaded and copied to peers, or given up; TimedOut after so many seconds."""
        if self._background is not None:
            self._background.wait()
        self._senders.wait(timeout)
        self._senders.raise_failed()

    def close(self) -> None:
        """Let another process save here; waits for saves that go on, for uploads and for removals, and raises what went wrong with them."""
        background, self._background = self._background, None
        try:
            if background is not None:
                background.wait()
            self._senders.wait()
            self._senders.raise_failed()
        finally:
            if background is not None:
                background.close()
            if self._deliveries is not None:
                self._deliveries.writer.close()
            self._senders.close()
            if self._joined is not None:
                self._joined.close()
            self.cleaner.wait_before(self._close_store)

    @property
    def is_saving(self) -> bool:
        """Whether a snapshot of this process is being copied or written beside training."""
        return self._background is not None and self._background.is_saving

    def give_writer_up(self) -> None:
        """The writer process hangs: what it has of this process fails now, with WriterLost. From any thread; waits for nobody."""
        if self._deliveries is not None:
            self._deliveries.writer.give_up()

    def unlock(self) -> None:
        """Let another process save here while nothing is being saved; uploads go on."""
        self.cleaner.wait_before(self._close_store)

    def _close_store(self) -> None:
        if self.session is not None:
            self.session.end()
        if self._store is not None:
            self._store.close()
            self._store = None

    def __enter__(self) -> Checkpointer:
        return self

    def __del__(self) -> None:
        if getattr(self, "_store", None) is not None:
            self.close()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self.session is not None and kind is not None and issubclass(kind, Exception):
            self.session.abandon()
        self.close()

    def _saves(self) -> Background:
        if self._background is None:
            self._background = Background(self._delivered())
        return self._background

    def _delivered(self) -> Deliveries:
        if self._deliveries is None:
            self._deliveries = Deliveries(
                self.path, self._group, self._settings, self._writing, self._hear, self._hear_bytes
            )
        return self._deliveries

    def _hear(self, handle: SaveHandle, stage: Stage, crc32c: int | None) -> None:
        """What became of a save beside training; in one of its threads."""
        if stage == "durable":
            self._become_durable(handle.step, crc32c, handle.begun)
            self._schedule.became_durable(time.monotonic() - handle.begun)
            return
        if stage == "failed" and handle.error is not None:
            _LOG.warning("the save of step %d has failed: %s", handle.step, handle.error)
            self.reports.say_failed(handle.step, handle.begun, handle.error)
            return
        self.reports.say(stage, handle.step, handle.begun)

    def _hear_bytes(self, handle: SaveHandle) -> None:
        """A save beside training goes on; in one of its threads."""
        self.reports.advance("written", handle.step, handle.written_bytes, handle.total_bytes)

    def _opened_store(self) -> Store:
        if self._store is None:
            self._store = Store(self.path, files=self._files)
        return self._store

    def _lock(self) -> None:
        """One process of the group holds the lock for all of them."""
        if self._group.rank == 0 and not self._opened_store().is_locked:
            session, seconds = self._group.session, self._writing.deadline_seconds
            watch = WriterWatch(self.path, self.reports, PATIENT_SECONDS)
            self._opened_store().lock(self._run, patience_seconds=seconds, look=watch.look)
            self._opened_store().sweep(keep=session)
            if self.session is not None:
                self.session.begin()
            if self._joined is not None:
                self._joined.note(self.path)
            saved = self.steps()
            if saved and saved[-1] not in self._begun:
                # What an earlier session did not come to.
                self._senders.offer_old(saved[-1])

    def _load_one(
        self, hop: Hop, state: Mapping[str, Any], rules: Rules | None, streams: bool
    ) -> Loaded:
        listing = self._chain.listing_of(hop)
        with self.catalogue.open(hop.step, listing) as opened:
            crc = manifests.crc_of(opened.manifest_bytes)
            neighbours = self._group.met().neighbours
            visit = neighbours.visit(f"{hop.step}-{crc:08x}") if neighbours is not None else None
            loaded = load(
                opened,
                parts_of(state, with_streams=streams),
                rules,
                rank=self._group.rank,
                visit=visit,
            )
            self._parent = Parent(step=hop.step, crc32c=crc)
        loaded.where = listing.where
        if self._group.rank == 0:
            self._chain.took(hop)
        found = loaded.statistics
        _LOG.info(
            "step %d loaded from %s, %s: %d bytes read, %d of them for other ranks of this host too, %d taken from one that read them",
            hop.step,
            listing.where,
            loaded.how,
            found.bytes_read,
            found.bytes_given,
            found.bytes_taken,
        )
        return loaded

    def _hear_sent(self, done: What, failed: What, answer: Uploaded | Failed) -> None:
        """What became of an upload, or of a copy to peers; in its thread."""
        is_own = answer.step in self._begun
        begun = self._begun.get(answer.step, time.monotonic())
        if isinstance(answer, Failed):
            why = answer.what + (f"; fix: {answer.fix}" if answer.fix else "")
            _LOG.warning("step %d is not %s: %s", answer.step, done, why)
            self.reports.say(failed, answer.step, begun, why)
        elif is_own or answer.is_new:
            if answer.trouble:
                _LOG.warning("old uploads were not removed: %s", answer.trouble)
            detail = f"{answer.sent_bytes} bytes sent, {answer.referred_bytes} unchanged"
            self.reports.say(done, answer.step, begun, detail)
        if self._group.rank == 0:
            self.cleaner.start(lambda: self._store, None)


def _raise(failure: BaseException) -> NoReturn:
    raise failure


def _check_kind(name: str, value: object, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} = {value!r} is no {kind.__name__}", fix=f"give {example}")
