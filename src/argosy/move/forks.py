"""Connections of Gloo that forked children must not keep: through them the other ranks learn that this process has ended.

A child (a worker of a DataLoader) has a copy of every descriptor, and the kernel closes a connection with its last copy: while the child lives nobody learns
that its parent was killed. Gloo does not say which descriptors are its own, so they are known by their addresses, which torchgroup.py tells. Nothing is
closed in the process that has the group.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Address = tuple[str, int]


@dataclass(frozen=True)
class Ends:
    """Where a backend of this process listens, and where those of the other ranks do."""

    own: frozenset[Address]
    others: frozenset[Address]


_ends: weakref.WeakKeyDictionary[Any, Ends] = weakref.WeakKeyDictionary()
"""By backend, as long as it lives: afterwards its ports may be another program's."""


def listening() -> frozenset[Address]:
    """The addresses at which this process listens."""
    return frozenset(local for _, local, peer in _connections() if peer is None)


def keep_to_itself(backend: Any, ends: Ends) -> None:
    """From now on neither a forked child nor another program that is started has the connections of a backend."""
    _ends[backend] = ends
    for descriptor in _descriptors_of(ends):
        os.set_inheritable(descriptor, False)


def _let_go() -> None:
    """In a child. Closed descriptors would be given out again, and the backend's remains may close them later: these numbers stay taken."""
    if not _ends:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for ends in list(_ends.values()):
        for descriptor in _descriptors_of(ends):
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)


def _descriptors_of(ends: Ends) -> list[int]:
    return [
        descriptor
        for descriptor, local, peer in _connections()
        if local in ends.own or peer in ends.others
    ]


def _connections() -> Iterator[tuple[int, Address, Address | None]]:
    """(descriptor, own address, the other end's address) of all TCP sockets of this process; None for one that is not connected."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(entry.name)
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                local, peer = found.getsockname()[:2], None
                if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    peer = found.getpeername()[:2]
        except OSError:
            continue  # closed meanwhile, or not connected
        yield descriptor, local, peer
