"""The facade: save a state, load the newest good one, look into one. Works in any script, with or without a cluster.

`save` is durable when it returns. `load` takes the newest checkpoint that proves whole and falls back to older ones, saying so. One `Checkpointer`
per process and store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from argosy.checkpoint import manifests, saving
from argosy.checkpoint.blocks import THREADS
from argosy.checkpoint.books import Book
from argosy.checkpoint.catalogue import Catalogue
from argosy.checkpoint.commits import Store
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.loading import Loaded, Rules, load
from argosy.checkpoint.manifests import Parent
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.registry import parts_of
from argosy.checkpoint.saving import Facts
from argosy.errors import ArgosyError, CheckpointDamaged, ConfigError, HomeError, NotFoundError

_LOG = logging.getLogger("argosy.checkpoint")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a save."""

    what: Literal["requested", "staged", "durable", "uploaded", "failed"]
    step: int
    seconds: float
    """Since it was requested."""
    detail: str = ""


Listener = Callable[[Event], None]


class Checkpointer:
    """Checkpoints of one run in one directory."""

    def __init__(
        self,
        directory: Path | str,
        *,
        run: str = "",
        listener: Listener | None = None,
        threads: int = THREADS,
        files: Files = FILES,
    ) -> None:
        self.path = Path(directory)
        self.catalogue = Catalogue(self.path, files=files)
        self._run = run
        self._listener = listener
        self._threads = threads
        self._files = files
        self._store: Store | None = None
        self._parent: Parent | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        streams: bool = True,
    ) -> Path:
        """Save a state as a step; when this returns it survives the loss of power. What was there is untouched if it fails."""
        begun = time.monotonic()
        self._say("requested", step, begun)
        book = Book()
        for part in parts_of(state, with_streams=streams).values():
            part.gather(book)
        store = self._locked()
        staging = store.stage(step)
        try:
            image, written = saving.write_alone(
                staging, book, files=self._files, threads=self._threads
            )
            small = saving.write_small(staging, image, book.values)
            facts = Facts(
                step=step, run=self._run, parent=self._parent, metrics=dict(metrics or {})
            )
            manifest = saving.manifest_of(facts, image, written, small, book)
            data = saving.commit(staging, manifest)
        except BaseException as failure:
            staging.abandon()
            self._say("failed", step, begun, str(failure))
            raise
        self._parent = Parent(step=step, crc32c=manifests.crc_of(data))
        self._say("durable", step, begun)
        return staging.store.path / staging.final

    def load(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        rules: Rules | None = None,
        streams: bool = True,
    ) -> Loaded | None:
        """Fill a state from the newest good checkpoint, or from the step that is named; None when the store is empty."""
        if step is not None:
            return self._load_one(step, state, rules, streams)
        skipped: list[str] = []
        for candidate in self.catalogue.candidates():
            try:
                loaded = self._load_one(candidate, state, rules, streams)
            except (CheckpointDamaged, ConfigError, HomeError) as failure:
                skipped.append(f"step {candidate}: {failure.what}")
                _LOG.warning(
                    "step %d cannot be used, an older one is tried: %s", candidate, failure.what
                )
                continue
            loaded.skipped = skipped
            return loaded
        if skipped:
            raise CheckpointDamaged(
                f"no checkpoint of {self.path} can be used; the newest: {skipped[0]}",
                fix="get a copy from elsewhere; the state may be partly overwritten",
            )
        return None

    def open(self, step: int | None = None) -> Opened:
        """A checkpoint to look into; the newest that opens unless told."""
        if step is not None:
            return self.catalogue.open(step)
        first: ArgosyError | None = None
        for candidate in self.catalogue.candidates():
            try:
                return self.catalogue.open(candidate)
            except ArgosyError as failure:
                first = first or failure
        raise first or NotFoundError(f"{self.path} has no checkpoint", fix="save one first")

    def steps(self) -> list[int]:
        """Saved steps, rising."""
        return self.catalogue.steps()

    def close(self) -> None:
        """Let another process save here."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _locked(self) -> Store:
        if self._store is None:
            store = Store(self.path, files=self._files)
            try:
                store.lock(self._run)
                store.sweep()
            except BaseException:
                store.close()
                raise
            self._store = store
        return self._store

    def _load_one(
        self, step: int, state: Mapping[str, Any], rules: Rules | None, streams: bool
    ) -> Loaded:
        with self.catalogue.open(step) as opened:
            loaded = load(opened, parts_of(state, with_streams=streams), rules)
            crc = manifests.crc_of(opened.manifest_bytes)
            self._parent = Parent(step=step, crc32c=crc)
        _LOG.info(
            "step %d loaded from %s: %d bytes read", step, self.path, loaded.statistics.bytes_read
        )
        return loaded

    def _say(self, what: Any, step: int, begun: float, detail: str = "") -> None:
        event = Event(what=what, step=step, seconds=time.monotonic() - begun, detail=detail)
        _LOG.info("step %d %s after %.3f s %s", step, what, event.seconds, detail)
        if self._listener is not None:
            self._listener(event)
