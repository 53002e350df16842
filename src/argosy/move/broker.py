"""Descriptors of arenas: from the keeper when this process is part of a run, private memfds otherwise.

Inside a run the keeper owns the memory, so that it outlives the process that made it; names are per run. Outside one, names are
per process and its forked children. Used by arenas.py and pools.py; nothing here maps memory. Never imports torch.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import operator
import os
import threading
from dataclasses import dataclass
from typing import Literal

from argosy.errors import ArenaGone, ArgosyError, ClusterError, ConfigError, NoRoom
from argosy.protocol import link as links

Scope = Literal["process", "run"]
SECONDS = 30.0
_RELEASE_SECONDS = 2.0
_MOST_NAME = 512
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class Grant:
    """The use of one memfd; the descriptor belongs to whoever holds the grant."""

    name: str
    """Empty when the descriptor came from somewhere else: there is nothing to release."""
    descriptor: int
    size: int
    run: str
    """Id of the run whose keeper owns it; empty outside a run."""


@dataclass
class _Private:
    descriptor: int
    size: int
    scope: Scope


_lock = threading.Lock()
_private: dict[str, _Private] = {}
_uses: dict[str, int] = {}
"""How many grants of this process are open, by name."""
_abandoned: collections.deque[str] = collections.deque()
"""Names of grants whose holders have died: a finalizer may run anywhere, also where the lock is held, so it never waits for it."""


def create(name: str, size: int, *, scope: Scope = "process", timeout: float = SECONDS) -> Grant:
    """Make a memfd, or get the one that is there already with this name, size and scope."""
    _check_name(name)
    size = checked_size(name, size)
    if size > _MOST_BYTES:
        raise NoRoom(f"arena {name!r} of {size} bytes", fix="no host has that: ask for less")
    if scope not in ("process", "run"):
        raise ConfigError(f"arena {name!r} with scope {scope!r}", fix="use 'process' or 'run'")
    own = links.current()
    if own is None:
        return _create_private(name, size, scope)
    frame = {"type": "arena_create", "name": name, "size": size, "scope": scope}
    return _ask(own, frame, timeout)


def open(name: str, *, timeout: float = SECONDS) -> Grant:
    """Get a memfd that a process of the run has made; ArenaGone when there is none."""
    _check_name(name)
    own = links.current()
    if own is not None:
        return _ask(own, {"type": "arena_open", "name": name}, timeout)
    with _lock:
        _drain()
        found = _private.get(name)
        if found is None:
            raise ArenaGone(
                f"this process has no arena {name!r}",
                fix="create it first; outside a run, names are known in one process and its forks",
            )
        return _grant_private(name, found)


def close(grant: Grant) -> None:
    """Give a grant back; with its last user an arena of scope `process`, or without memory, ends. Mappings stay valid."""
    os.close(grant.descriptor)
    if grant.name and _forget_use(grant.name) and grant.run:
        # The keeper also releases by itself when the process ends: not being able to say it is no error.
        with contextlib.suppress(ArgosyError):
            release(grant.name, timeout=_RELEASE_SECONDS)


def abandon(grant: Grant) -> None:
    """The same from a finalizer: local alone, it never waits for anybody."""
    os.close(grant.descriptor)
    if grant.name:
        _abandoned.append(grant.name)
        if _lock.acquire(blocking=False):
            try:
                _drain()
            finally:
                _lock.release()


def release(name: str, *, timeout: float = SECONDS) -> None:
    """Give up this process's use of a name; mappings and open grants stay valid until they are closed."""
    own = links.current()
    if own is None:
        with _lock:
            found = _private.pop(name, None)
        if found is None:
            raise ArenaGone(f"this process has no arena {name!r}")
        os.close(found.descriptor)
        return
    reply, descriptors = own.ask({"type": "arena_release", "name": name}, timeout=timeout)
    _close_all(descriptors)
    if not reply.get("ok"):
        raise ArenaGone(str(reply.get("error") or f"no arena {name!r}"))


def end_run() -> None:
    """Outside a cluster: the run of this process is over, and names of its arenas are free. Mappings and open grants stay valid."""
    with _lock:
        _drain()
        for name in [name for name, one in _private.items() if one.scope == "run"]:
            os.close(_private.pop(name).descriptor)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or "\0" in name:
        raise ConfigError(f"{name!r} is no name of an arena", fix="use a text without zero bytes")
    if not 0 < len(name) <= _MOST_NAME:
        raise ConfigError(
            f"an arena's name has 1 to {_MOST_NAME} characters, not {len(name)}",
            fix="use a shorter name" if name else "give it a name",
        )


def checked_size(name: str, size: int) -> int:
    """The size as a plain number; ConfigError when it is none."""
    try:
        size = operator.index(size)
    except TypeError:
        raise ConfigError(f"arena {name!r} of {size!r} bytes", fix="give a whole number")
    if size <= 0:
        raise ConfigError(f"arena {name!r} of {size} bytes", fix="give a positive size")
    return size


def is_empty(descriptor: int) -> bool:
    """Whether a memfd has no memory: whoever made it could not get any, or has ended before."""
    return os.fstat(descriptor).st_blocks == 0


def memfd(name: str, size: int) -> int:
    """A private memfd of fixed size that can still be sealed for reading."""
    try:
        # The kernel takes at most 249 bytes; the name is for people who look at /proc alone.
        label = f"argosy-{name}".encode(errors="replace")[:200].decode(errors="ignore")
        descriptor = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as failure:
        raise NoRoom(
            f"no memfd for arena {name!r}: {failure.strerror}",
            fix="raise the limit of open files: ulimit -n",
        )
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError as failure:
        os.close(descriptor)
        raise NoRoom(f"arena {name!r} of {size} bytes: {failure.strerror}", fix="ask for less")
    return descriptor


def current_run() -> str:
    """Id of the run this process is part of; empty outside one."""
    return os.environ.get("ARGOSY_RUN", "run") if links.is_under_argosy() else ""


def _create_private(name: str, size: int, scope: Scope) -> Grant:
    with _lock:
        _drain()
        found = _private.get(name)
        if found is None:
            found = _Private(memfd(name, size), size, scope)
            _private[name] = found
        elif (found.size, found.scope) != (size, scope):
            raise _clash(f"arena {name!r} exists with {found.size} bytes, scope {found.scope!r}")
        return _grant_private(name, found)


def _grant_private(name: str, found: _Private) -> Grant:
    try:
        descriptor = os.dup(found.descriptor)
    except OSError as failure:
        raise NoRoom(f"arena {name!r}: {failure.strerror}", fix="raise the limit: ulimit -n")
    _uses[name] = _uses.get(name, 0) + 1
    return Grant(name, descriptor, found.size, "")


def _forget_use(name: str) -> bool:
    """Whether that was the last grant of this name in this process."""
    with _lock:
        _drain()
        return _count_down(name)


def _drain() -> None:
    """Under the lock: what finalizers have left to do."""
    while _abandoned:
        _count_down(_abandoned.popleft())


def _count_down(name: str) -> bool:
    _uses[name] = _uses.get(name, 1) - 1
    if _uses[name] > 0:
        return False
    del _uses[name]
    found = _private.get(name)
    if found is not None and (found.scope == "process" or is_empty(found.descriptor)):
        del _private[name]
        os.close(found.descriptor)
    return True


def _forget_lock() -> None:
    # A child forked while another thread held the lock would find it taken for ever.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _ask(own: links.Link, frame: links.Frame, timeout: float) -> Grant:
    reply, descriptors = own.ask(frame, timeout=timeout)
    name = str(frame["name"])
    if reply.get("ok") and len(descriptors) == 1:
        with _lock:
            _uses[name] = _uses.get(name, 0) + 1
        return Grant(name, descriptors[0], os.fstat(descriptors[0]).st_size, current_run())
    _close_all(descriptors)
    what = str(reply.get("error") or "the keeper sent no descriptor")
    if frame["type"] == "arena_open":
        raise ArenaGone(what, fix="create it first, in a process of the same run")
    raise _clash(what)


def _clash(what: str) -> ClusterError:
    return ClusterError(what, fix="use another name, or the same size and scope")


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
