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

from argosy.checkpoint import groups, manifests, names, saving
from argosy.checkpoint.blocks import THREADS
from argosy.checkpoint.boards import Group
from argosy.checkpoint.books import Book
from argosy.checkpoint.catalogue import Catalogue
from argosy.checkpoint.commits import Store
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.loading import Loaded, Rules, load
from argosy.checkpoint.manifests import Parent
from argosy.checkpoint.opened import Opened
from argosy.checkpoint.registry import parts_of
from argosy.checkpoint.saving import Facts, Settings
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
        group: Group | None = None,
        shards: bool = False,
        listener: Listener | None = None,
        threads: int = THREADS,
        files: Files = FILES,
    ) -> None:
        self.path = Path(directory)
        self.catalogue = Catalogue(self.path, files=files)
        self._run = run
        self._group = group or groups.of_process()
        self._shards = shards
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
        attachments: Mapping[str, bytes] | None = None,
        streams: bool = True,
    ) -> Path:
        """Save a state as a step; when this returns it survives the loss of power. What was there is untouched if it fails.

        `attachments` are small files that lie beside the data, like the config.json that other programs look for.
        """
        begun = time.monotonic()
        self._say("requested", step, begun)
        facts = Facts(
            step=step,
            run=self._run,
            parent=self._parent,
            world=self._group.size,
            metrics=dict(metrics or {}),
            attachments=dict(attachments or {}),
        )
        settings = Settings(files=self._files, threads=self._threads, shards=self._shards)

        def gather() -> Book:
            self._lock()
            book = Book(self._group.rank)
            for part in parts_of(state, with_streams=streams).values():
                part.gather(book)
            return book

        try:
            store = self._opened_store()
            data: bytes | None
            if self._group.is_alone:
                data = saving.save(store, facts, gather(), settings)
            else:
                data = saving.save_together(store, facts, gather, self._group, settings)
        except BaseException as failure:
            self._say("failed", step, begun, str(failure))
            raise
        path = self.path / names.step_name(step)
        if data is None:
            data = (path / names.MANIFEST).read_bytes()
        self._parent = Parent(step=step, crc32c=manifests.crc_of(data))
        self._say("durable", step, begun)
        return path

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
        for candidate in self._candidates():
            loaded, why = self._try(candidate, state, rules, streams)
            if loaded is not None:
                loaded.skipped = skipped
                return loaded
            skipped.append(f"step {candidate}: {why}")
            _LOG.warning("step %d cannot be used, an older one is tried: %s", candidate, why)
        if skipped:
            raise CheckpointDamaged(
                f"no checkpoint of {self.path} can be used; the newest: {skipped[0]}",
                fix="get a copy from elsewhere; the state may be partly overwritten",
            )
        return None

    def _candidates(self) -> list[int]:
        """Newest first, as rank 0 sees the store: a listing may differ from host to host."""
        mine = list(self.catalogue.candidates())
        said = self._group.agree(msgspec.json.encode(mine))
        return msgspec.json.decode(said[0], type=list[int])

    def _try(
        self, step: int, state: Mapping[str, Any], rules: Rules | None, streams: bool
    ) -> tuple[Loaded | None, str]:
        """Load one; it counts when every rank has it whole, so that all of them resume from the same step."""
        loaded, why = None, ""
        try:
            loaded = self._load_one(step, state, rules, streams)
        except (CheckpointDamaged, NotFoundError, ConfigError, HomeError) as failure:
            why = failure.what
        for rank, said in enumerate(self._group.agree(why.encode())):
            if said:
                return None, f"rank {rank}: {said.decode()}" if self._group.size > 1 else why
        return loaded, why

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

    def _opened_store(self) -> Store:
        if self._store is None:
            self._store = Store(self.path, files=self._files)
        return self._store

    def _lock(self) -> None:
        """One process of the group holds the lock for all of them."""
        if self._group.rank == 0 and not self._opened_store().is_locked:
            self._opened_store().lock(self._run)
            self._opened_store().sweep(keep=self._group.session)

    def _load_one(
        self, step: int, state: Mapping[str, Any], rules: Rules | None, streams: bool
    ) -> Loaded:
        with self.catalogue.open(step) as opened:
            loaded = load(
                opened, parts_of(state, with_streams=streams), rules, rank=self._group.rank
            )
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
