"""The process that uploads, or copies to peers: takes steps from the checkpointer one by one, sends them, and keeps what the rules say.

It has a low priority and is no child of training's terminal: when the checkpointer is dead it finishes what it has and ends. One upload at a time
from a store, by a lock; the next session's waits for it. `python -m argosy.checkpoint.tiers` runs it. No torch.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Protocol

from argosy.checkpoint.listings import Listing
from argosy.checkpoint.peers import copies, joining
from argosy.checkpoint.peers.settings import Copying
from argosy.checkpoint.tiers import claims, orders, uploads
from argosy.checkpoint.tiers.keeping import Keeper
from argosy.checkpoint.tiers.orders import Answer, Begin, Failed, Progress, Send, Uploaded
from argosy.checkpoint.tiers.remotes import RemoteListing
from argosy.checkpoint.tiers.settings import Objects
from argosy.checkpoint.writer.pacing import Pace, Rate, lower_priority
from argosy.errors import ArgosyError, ConfigError

_LOG = logging.getLogger("argosy.checkpoint")


def main() -> int:
    """Until stdin ends."""
    lower_priority()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    begin = orders.decode_order(sys.stdin.buffer.readline())
    if not isinstance(begin, Begin):
        return ConfigError.exit_code
    work = work_of(begin)
    for line in sys.stdin.buffer:
        order = orders.decode_order(line)
        if isinstance(order, Send):
            say(carry_out(work, order.step))
    return 0


class Work(Protocol):
    """What the process does with a step."""

    def send(self, step: int) -> Uploaded:
        """Have it where it belongs."""


def work_of(begin: Begin) -> Work:
    """As it was told."""
    if begin.copying is not None:
        return PeerCopies(Path(begin.store), begin.copying)
    assert begin.objects is not None
    return Uploads(Path(begin.store), begin.run, begin.objects)


def carry_out(work: Work, step: int) -> Answer:
    """Send a step; whatever goes wrong is an answer."""
    try:
        return work.send(step)
    except ArgosyError as failure:
        kind = type(failure).__name__
        return Failed(step=step, kind=kind, what=failure.what, fix=failure.fix)
    except Exception:  # noqa: BLE001 - the last resort of the process: the checkpointer must hear of it
        return Failed(step=step, kind="", what=traceback.format_exc(limit=8))


class PeerCopies:
    """Steps into the memory of peers."""

    def __init__(self, store: Path, copying: Copying) -> None:
        self._listing = Listing(store)
        self._copying = copying
        self._route = joining.route_of(copying.peers)
        self._asked: copies.Asked = {}
        self._rate = Rate()

    def send(self, step: int) -> Uploaded:
        """This host's part of it."""
        begun, peers = time.monotonic(), self._copying.peers

        def tell(num_bytes: int) -> None:
            say(Progress(step=step, num_bytes=num_bytes))

        pace = Pace(self._rate, peers.bytes_per_second, peers.deadline_seconds, tell)
        with self._listing.folder(step) as folder:
            copied = copies.copy(folder, self._route, self._copying, pace, self._asked)
        return Uploaded(
            step=step,
            sent_bytes=copied.sent_bytes,
            found_bytes=copied.found_bytes,
            referred_bytes=0,
            is_new=bool(copied.sent_bytes),
            seconds=time.monotonic() - begun,
        )


class Uploads:
    """Steps into an object store."""

    def __init__(self, store: Path, run: str, objects: Objects) -> None:
        self._objects = objects
        self._store = store
        self._run = run
        self._listing = Listing(self._store)
        self._remote: RemoteListing | None = None
        self._keeper: Keeper | None = None
        self._claim = 0
        self._rate = Rate()

    def send(self, step: int) -> Uploaded:
        """All of it that is not there."""
        begun = time.monotonic()
        seconds = self._objects.deadline_seconds

        def tell(num_bytes: int) -> None:
            say(Progress(step=step, num_bytes=num_bytes))

        deadline = begun + seconds
        alone = claims.lock_uploads(self._store, deadline)
        try:
            with self._listing.folder(step) as folder:
                remote, keeper = self._prepared(deadline)
                self._claim = claims.renew(remote.bucket, self._store, self._run, self._claim)
                pace = Pace(self._rate, self._objects.bytes_per_second, seconds, tell)
                sent = uploads.upload(
                    folder,
                    remote,
                    claim=self._claim,
                    pace=pace,
                    files_at_once=self._objects.files_at_once,
                )
            removed, trouble = self._clean(keeper, step)
        finally:
            os.close(alone)
        return Uploaded(
            step=step,
            sent_bytes=sent.sent_bytes,
            found_bytes=sent.found_bytes,
            referred_bytes=sent.referred_bytes,
            is_new=sent.is_new,
            seconds=time.monotonic() - begun,
            removed=removed,
            trouble=trouble,
        )

    def _prepared(self, deadline: float) -> tuple[RemoteListing, Keeper]:
        if self._remote is None or self._keeper is None:
            remote = RemoteListing.of(
                self._objects, patience_seconds=self._objects.deadline_seconds
            )
            self._remote, self._keeper = remote, Keeper(remote, self._objects.keep)
        self._remote.bucket.until = deadline
        return self._remote, self._keeper

    def _clean(self, keeper: Keeper, step: int) -> tuple[list[int], str]:
        try:
            return [one.step for one in keeper.clean(step)], ""
        except ArgosyError as failure:
            # More stays than wanted; the next upload tries again.
            return [], failure.what


def say(answer: Answer) -> None:
    """To the checkpointer, if there is still one."""
    try:
        sys.stdout.buffer.write(orders.encode(answer))
        sys.stdout.buffer.flush()
    except OSError:
        # Dead; the upload is not. Nothing more can be said.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
