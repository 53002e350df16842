"""Arenas: shared memory that the keeper owns, so it outlives the process that made it.

A thin client of the keeper's broker: create, open and release by name; a descriptor and a mapping come back. Names are per run.
What lies in an arena is the caller's business. Never imports torch.
"""

from __future__ import annotations

import mmap
import os
from typing import Literal

from argosy.errors import ClusterError, ConfigError, NotFoundError
from argosy.protocol import link as links

Scope = Literal["process", "run"]
_SECONDS = 30.0


class Arena:
    """One mapped arena; closing it unmaps it here and releases nothing elsewhere."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def __repr__(self) -> str:
        return f"Arena({self.name!r}, {self.size} bytes)"

    def fileno(self) -> int:
        """Descriptor of the memfd."""
        return self._descriptor

    @property
    def memory(self) -> mmap.mmap:
        """The arena's bytes, shared with every process that maps it; made when first asked for."""
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, self.size)
        return self._map

    def close(self) -> None:
        """Unmap and close; views of `memory` must be gone by then."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def create(name: str, size: int, *, scope: Scope = "process", timeout: float = _SECONDS) -> Arena:
    """Make an arena, or get the one that is there already with this name, size and scope.

    `process`: released with its last user; `run`: kept until the run ends.
    """
    if size <= 0:
        raise ConfigError(f"arena {name!r} of {size} bytes", fix="give a positive size")
    frame = {"type": "arena_create", "name": name, "size": size, "scope": scope}
    return _receive(frame, timeout)


def open(name: str, *, timeout: float = _SECONDS) -> Arena:
    """Map an arena that another process of the run has made."""
    return _receive({"type": "arena_open", "name": name}, timeout)


def release(name: str, *, timeout: float = _SECONDS) -> None:
    """Give up this process's use of an arena in the keeper; mappings stay valid until they are closed."""
    reply, descriptors = _link().ask({"type": "arena_release", "name": name}, timeout=timeout)
    _close(descriptors)
    if not reply.get("ok"):
        raise NotFoundError(str(reply.get("error") or f"no arena {name!r}"))


def _receive(frame: links.Frame, timeout: float) -> Arena:
    reply, descriptors = _link().ask(frame, timeout=timeout)
    if reply.get("ok") and len(descriptors) == 1:
        return Arena(str(frame["name"]), descriptors[0])
    _close(descriptors)
    what = str(reply.get("error") or "the keeper sent no descriptor")
    if frame["type"] == "arena_open":
        raise NotFoundError(what, fix="create it first, in a process of the same run")
    raise ClusterError(what, fix="use another name, or the same size and scope")


def _link() -> links.Link:
    own = links.current()
    if own is None:
        raise ConfigError(
            "arenas belong to a run, and this process is not part of one", fix="use `argosy run`"
        )
    return own


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
