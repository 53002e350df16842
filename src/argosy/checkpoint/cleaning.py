"""Retention carried out: reads what a store holds, proves the newest, removes what the rules let go. No torch.

Called by the checkpointer after each commit, in a thread of its own, and by `argosy checkpoint gc`. Only the holder of the store's lock removes
anything. A crash at any point leaves whole checkpoints and names that nobody reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from argosy.checkpoint import changes, collection, names, retention
from argosy.checkpoint.commits import Store
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.listings import Listing, Report
from argosy.checkpoint.retention import Keep, Known, Removal
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError

_LOG = logging.getLogger("argosy.checkpoint")


@dataclass(kw_only=True)
class Cleaned:
    """What a cleaning came to."""

    removed: list[Removal] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    idle_pins: list[int] = field(default_factory=list)
    freed_bytes: int = 0
    verified: int | None = None
    damaged: list[str] = field(default_factory=list)


def survey(listing: Listing, held: Collection[int] = ()) -> tuple[list[Known], list[str]]:
    """The facts that retention goes by, and what is wrong with checkpoints; those whose manifest cannot be read are left alone. Held steps count as pinned."""
    pins = {*listing.pins(), *held}
    known, odd = [], []
    for step in listing.steps():
        try:
            with listing.folder(step) as folder:
                manifest = folder.manifest
                fault = _fault_of(listing, folder)
        except ArgosyError as failure:
            odd.append(f"step {step}: {failure.what}")
            continue
        if fault:
            odd.append(f"step {step}: {fault}")
        known.append(
            Known(
                step=step,
                saved_at=manifest.saved_at,
                num_bytes=collection.own_bytes(manifest),
                metrics=manifest.metrics,
                is_pinned=step in pins,
                needs=collection.needs_of(manifest),
                is_damaged=bool(fault),
            )
        )
    return known, odd


def _fault_of(listing: Listing, folder: Folder) -> str:
    """Why a checkpoint is not whole, as far as that is known without reading it."""
    try:
        folder.check_files()
    except CheckpointDamaged as failure:
        return failure.what
    is_marked = (listing.path / names.damaged_name(folder.step)).exists()
    return "it was read before, and was damaged" if is_marked else ""


def clean(
    store: Store,
    listing: Listing,
    keep: Keep,
    *,
    verify: Callable[[int], Report] | None = None,
    is_dry: bool = False,
    held: Callable[[], Collection[int]] | None = None,
    newest: int | None = None,
) -> Cleaned:
    """Remove what the rules let go, after a newer one was read and found right; `is_dry` only says what would go.

    `newest` is the step that was just committed. What lies above it is of a session that went further, and was not gone on from: it stays, and lets nothing go.
    """
    found = Cleaned()
    known, found.damaged = survey(listing, held() if held is not None else ())
    if known and retention.is_unrated(known, keep):
        _LOG.warning("%s: %s", listing.path, _no_metric(known, keep))
    now, free = time.time(), store.free_bytes()
    # The newest first.
    usable = [one for one in reversed(known) if newest is None or one.step <= newest]
    if usable and retention.wants_verified(known, keep, usable[0].step, now=now, free_bytes=free):
        found.verified = _prove(
            listing, usable, verify or listing.verify, found.damaged, is_dry=is_dry
        )
    if found.verified is None or found.verified not in listing.steps():
        return found
    planned = retention.plan(known, keep, {found.verified}, now=now, free_bytes=free)
    sizes = {one.step: one.num_bytes for one in known}
    for removal in planned:
        # A pin that was set since the survey counts.
        if removal.step in listing.pins() or (held is not None and removal.step in held()):
            continue
        if not is_dry:
            store.remove(removal.step)
            _LOG.info("step %d of %s removed: %s", removal.step, listing.path, removal.why)
        found.removed.append(removal)
        found.freed_bytes += sizes[removal.step]
    return found


def check_metric(listing: Listing, keep: Keep) -> None:
    """ConfigError when `best` is the metric of no checkpoint: for a person who may have mistyped it."""
    known, _ = survey(listing)
    if known and retention.is_unrated(known, keep):
        raise ConfigError(
            _no_metric(known, keep), fix="`argosy checkpoint ls` shows which metrics each has"
        )


def _no_metric(known: list[Known], keep: Keep) -> str:
    metrics = sorted({name for one in known for name in one.metrics if not one.is_damaged})
    there = f"; there are {', '.join(metrics)}" if metrics else ""
    return f"no whole checkpoint has the metric {keep.best!r}{there}"


def collect(store: Store, listing: Listing, *, is_dry: bool = False) -> Cleaned:
    """Remove what no checkpoint owns: leftovers of sessions that have ended, pins of steps that are gone."""
    found = Cleaned()
    found.leftovers = collection.leftovers(os.listdir(listing.path))
    found.idle_pins = collection.idle_pins(listing.pins(), listing.steps())
    if not is_dry:
        store.sweep()
        for step in found.idle_pins:
            listing.unpin(step)
    return found


def _prove(
    listing: Listing,
    usable: list[Known],
    verify: Callable[[int], Report],
    damaged: list[str],
    *,
    is_dry: bool,
) -> int | None:
    """The first of them whose every byte is right."""
    for one in usable:
        report = verify(one.step)
        mark = listing.path / names.damaged_name(one.step)
        if report.is_good:
            if not is_dry:
                mark.unlink(missing_ok=True)
            return one.step
        if not one.is_damaged:
            damaged.append(f"step {one.step}: {report.faults[0]}")
        if not is_dry and not report.is_unreadable:
            mark.touch()
        _LOG.warning(
            "step %d is not whole, or cannot be read, and is not counted: %s",
            one.step,
            report.faults[0],
        )
    return None


class Cleaner:
    """Looks after a store when something was committed, in a thread: an alarm when training stands still, then retention. One at a time."""

    def __init__(
        self,
        listing: Listing,
        keep: Keep | None,
        held: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """`held` says which steps are needed for something else just now."""
        self._listing = listing
        self._held = held
        self._keep = None if keep is None else retention.check(keep)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._newest: int | None = None
        self.last: Cleaned | None = None
        self.failure: ArgosyError | None = None
        self.stuck: list[str] = []
        """Trained tensors that the newest save found as they were in the one before."""

    def start(self, find: Callable[[], Store | None], step: int | None) -> None:
        """Begin, unless this process has given the store back. `step` was just committed; None when only something that was held is free."""
        with self._lock:
            store = find()
            if store is None or not store.is_locked:
                return
            before = self._thread
            self._thread = threading.Thread(
                target=self._run, args=(store, step, before), name="argosy-cleaner", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Until the cleaning that is under way has ended."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def wait_before(self, close: Callable[[], None]) -> None:
        """Give the store back when no cleaning is under way; none begins before it is."""
        while True:
            self.wait()
            with self._lock:
                if self._thread is None or not self._thread.is_alive():
                    close()
                    return

    def _run(self, store: Store, step: int | None, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            if step is not None:
                self._newest = step
                # A checkpoint that is not whole is found, and told, by retention.
                with contextlib.suppress(CheckpointDamaged):
                    self._compare(step)
            if self._keep is not None:
                self.last = clean(
                    store, self._listing, self._keep, held=self._held, newest=self._newest
                )
            self.failure = None
        except ArgosyError as failure:
            # Training goes on with more checkpoints than wanted; the next save tries again.
            self.failure = failure
            _LOG.warning("old checkpoints of %s were not removed: %s", self._listing.path, failure)

    def _compare(self, step: int) -> None:
        """Whether what is trained has moved since the parent."""
        self.stuck = []
        with self._listing.folder(step) as folder:
            parent = folder.manifest.parent
            if parent is None or parent.step not in self._listing.steps():
                return
            with self._listing.folder(parent.step) as before:
                values = folder.trees()
                self.stuck = changes.stuck_tensors(before.manifest, folder.manifest, values)
        if self.stuck:
            _LOG.warning(
                "step %d: %d trained tensors have not changed since step %d, first %s: see learning rate, gradients and requires_grad",
                step,
                len(self.stuck),
                parent.step,
                self.stuck[0],
            )
