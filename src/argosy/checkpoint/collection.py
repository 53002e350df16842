"""What is still referred to: marking from the checkpoints that stay and through their manifests, and what a store holds that nobody owns.

A checkpoint may have unchanged files in the directory of an earlier one; as long as it stays, so does that. Pure; retention and cleaning ask here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from argosy.checkpoint import names
from argosy.checkpoint.manifests import Manifest


def mark(roots: Iterable[int], needs: Mapping[int, Collection[int]]) -> set[int]:
    """The roots and every step that they need, directly or through others."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        step = waiting.pop()
        if step not in found:
            found.add(step)
            waiting += needs.get(step, ())
    return found


def needs_of(manifest: Manifest) -> tuple[int, ...]:
    """Steps in whose directories files of this checkpoint lie; a hard link needs nobody."""
    found = {
        record.origin.step
        for record in manifest.files.values()
        if record.origin is not None and record.stored == "origin"
    }
    return tuple(sorted(found - {manifest.step}))


def own_bytes(manifest: Manifest) -> int:
    """Bytes of the files that this checkpoint does not share with an earlier one."""
    return sum(record.size for record in manifest.files.values() if record.origin is None)


def leftovers(listed: Iterable[str]) -> list[str]:
    """Directories that a session left half written or half removed: nobody's to read."""
    return sorted(name for name in listed if names.leftover_of(name) is not None)


def idle_pins(pinned: Iterable[int], steps: Collection[int]) -> list[int]:
    """Pins of steps that are not there."""
    return sorted(set(pinned) - set(steps))
