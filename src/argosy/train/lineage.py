"""Lineage: which checkpoints of a directory are of the training that goes on there.

A session that could not use the newest one goes on from an older: what lies above is not its own, does not count as saved, and is left as it is.
Used by the saver.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from argosy.checkpoint import names


class Lineage:
    """Of one session."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._strange: dict[int, tuple[int, int]] = {}

    def begin(self, step: int, steps: Iterable[int]) -> None:
        """The session goes on from a step; these are there."""
        self._strange = {one: self._mark(one) for one in steps if one > step}

    def has(self, step: int) -> bool:
        """Whether a step is saved, and not known to be damaged."""
        is_good = not self._is_damaged(step) and not self._is_strange(step)
        return is_good and (self._path / names.step_name(step) / names.MANIFEST).exists()

    def is_taken(self, step: int) -> bool:
        """Whether the name is that of another checkpoint, which nothing may be written over."""
        return self._is_strange(step) and not self._is_damaged(step)

    def _is_damaged(self, step: int) -> bool:
        return (self._path / names.damaged_name(step)).exists()

    def _is_strange(self, step: int) -> bool:
        return step in self._strange and self._strange[step] == self._mark(step)

    def _mark(self, step: int) -> tuple[int, int]:
        """Another one when the directory has been made anew."""
        try:
            found = os.stat(self._path / names.step_name(step))
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns
