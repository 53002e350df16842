"""Retention in an object store: the rules of retention.py, carried out there after each commit by the process that uploads.

Manifests go first, so that what is half removed is no checkpoint. What an upload that was given up left behind goes too, once a newer step is
committed. Only the session that holds the prefix calls this. No torch.
"""

from __future__ import annotations

import logging
import time

from argosy.checkpoint import collection, names, retention
from argosy.checkpoint.folders import Folder
from argosy.checkpoint.retention import Keep, Known, Removal
from argosy.checkpoint.tiers.buckets import Found
from argosy.checkpoint.tiers.remotes import ObjectPlace, RemoteListing, committed
from argosy.errors import CheckpointDamaged, ConfigError

_LOG = logging.getLogger("argosy.checkpoint")


class Keeper:
    """Remembers what it has read: a manifest never changes."""

    def __init__(self, remote: RemoteListing, keep: Keep | None) -> None:
        self._remote = remote
        self._keep = keep
        self._known: dict[int, Known] = {}

    def clean(self, step: int) -> list[Removal]:
        """Remove what the rules let go now that a step is committed; what went."""
        paths = self._remote.objects()
        steps = committed(paths)
        if step not in steps:
            return []
        pins = self._remote.pins()
        known = [one for at in steps if (one := self._fact(at, at in pins)) is not None]
        if len(known) == len(steps):
            self._remove_given_up(paths, known, step)
        removed = []
        keep = self._keep or Keep()
        for removal in retention.plan(known, keep, {step}, now=time.time(), free_bytes=0):
            self.remove(removal.step, paths)
            _LOG.info("step %d of %s removed: %s", removal.step, self._remote.where, removal.why)
            removed.append(removal)
        return removed

    def remove(self, step: int, paths: dict[str, Found]) -> None:
        """Delete a checkpoint."""
        directory = names.step_name(step)
        manifest = f"{directory}/{names.MANIFEST}"
        own = [path for path in paths if path.startswith(f"{directory}/") and path != manifest]
        self._remote.bucket.remove([manifest])
        self._remote.bucket.remove(own)
        self._known.pop(step, None)

    def _fact(self, step: int, is_pinned: bool) -> Known | None:
        """None for one that is damaged: it is left alone."""
        known = self._known.get(step)
        if known is None or known.is_pinned != is_pinned:
            try:
                place = ObjectPlace(self._remote.bucket, step, self._remote.secret)
                with Folder(place) as folder:
                    manifest = folder.manifest
            except (CheckpointDamaged, ConfigError) as failure:
                _LOG.warning("%s: step %d is left alone: %s", self._remote.where, step, failure)
                return None
            known = self._known[step] = Known(
                step=step,
                saved_at=manifest.saved_at,
                num_bytes=collection.own_bytes(manifest),
                metrics=manifest.metrics,
                is_pinned=is_pinned,
                needs=collection.needs_of(manifest),
            )
        return known

    def _remove_given_up(self, paths: dict[str, Found], known: list[Known], step: int) -> None:
        """Files of older steps that were never committed, and that nothing refers to."""
        held = {one.step for one in known}.union(*(one.needs for one in known))
        left = []
        for path in paths:
            found = names.step_of(path.partition("/")[0])
            if found is not None and found < step and found not in held:
                left.append(path)
        if left:
            _LOG.info("%s: %d files of given-up uploads removed", self._remote.where, len(left))
            self._remote.bucket.remove(left)
