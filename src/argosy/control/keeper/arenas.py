"""Memory that outlives a process: arenas (shared, by run and name) and blobs (sealed, by digest).

The keeper owns one descriptor of each; the agent holds duplicates so that a new keeper can have them back. Workers
create and open arenas over their link. Nothing here maps memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argosy.control.keeper.kernel import arena_memfd, read_memfd, sealed_memfd

SCOPES = ("process", "run")
_MOST_ARENAS_PER_RUN = 4096
_MOST_NAME = 512


class ArenaError(Exception):
    """A request about an arena or blob that cannot be met."""


@dataclass
class Arena:
    """One shared memfd."""

    run: str
    name: str
    size: int
    scope: str
    fd: int
    users: set[str] = field(default_factory=set)
    """attempts that opened it"""

    def hold(self) -> dict[str, Any]:
        """The frame that gives the agent its duplicate; its name is unique among all runs."""
        return {
            "type": "hold",
            "kind": "arena",
            "name": f"{self.run}/{self.name}",
            "run": self.run,
            "scope": self.scope,
            "size": self.size,
            "fds": 1,
        }


class Arenas:
    """All arenas of this host, by run and name."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], Arena] = {}
        self.announce: Callable[[dict[str, Any], list[int]], None] = lambda frame, fds: None
        """Tells the agent of holds and unholds."""

    def create(self, run: str, name: str, size: int, scope: str, user: str) -> Arena:
        """Make it, or give the one that exists with the same size and scope."""
        if not name or len(name) > _MOST_NAME:
            raise ArenaError(f"an arena's name has 1 to {_MOST_NAME} characters, not {len(name)}")
        if scope not in SCOPES:
            raise ArenaError(f"scope {scope!r} is not one of {', '.join(SCOPES)}")
        if size <= 0:
            raise ArenaError(f"size {size} is not positive")
        arena = self._by_name.get((run, name))
        if arena is not None and (arena.size, arena.scope) != (size, scope):
            raise ArenaError(
                f"arena {name!r} exists with {arena.size} bytes and scope {arena.scope!r}, "
                f"not {size} and {scope!r}"
            )
        if arena is None:
            if sum(1 for key in self._by_name if key[0] == run) >= _MOST_ARENAS_PER_RUN:
                raise ArenaError(f"run {run} has {_MOST_ARENAS_PER_RUN} arenas already")
            # The kernel takes at most 249 bytes and none that is zero; the label is for people who look at /proc alone.
            label = f"argosy:{name}".encode(errors="replace")[:200].decode(errors="ignore")
            try:
                arena = Arena(run, name, size, scope, arena_memfd(label.replace("\0", "_"), size))
            except OSError as error:
                raise ArenaError(f"arena {name!r} of {size} bytes: {error.strerror}")
            self._by_name[run, name] = arena
            self.announce(arena.hold(), [arena.fd])
        arena.users.add(user)
        return arena

    def open(self, run: str, name: str, user: str) -> Arena:
        """The existing arena."""
        arena = self._by_name.get((run, name))
        if arena is None:
            raise ArenaError(f"run {run} has no arena {name!r}")
        arena.users.add(user)
        return arena

    def release(self, run: str, name: str, user: str) -> None:
        """The user does not need it any more."""
        arena = self._by_name.get((run, name))
        if arena is None:
            raise ArenaError(f"run {run} has no arena {name!r}")
        self._drop_user(arena, user)

    def user_ended(self, run: str, user: str) -> None:
        """An attempt is gone: release what only it used."""
        for arena in [arena for key, arena in self._by_name.items() if key[0] == run]:
            if user in arena.users:
                self._drop_user(arena, user)

    def run_ended(self, run: str) -> int:
        """Release all arenas of a run; how many."""
        ended = [arena for key, arena in self._by_name.items() if key[0] == run]
        for arena in ended:
            self._drop(arena)
        return len(ended)

    def adopt(self, frame: dict[str, Any], fd: int) -> None:
        """Take over a duplicate that another process held for a dead keeper."""
        run = str(frame.get("run", ""))
        name = str(frame.get("name", "")).removeprefix(f"{run}/")
        if (run, name) in self._by_name:
            os.close(fd)
            return
        size = os.fstat(fd).st_size
        scope = str(frame.get("scope", "run"))
        arena = Arena(run, name, size, scope if scope in SCOPES else "run", fd)
        self._by_name[run, name] = arena

    def hold_all(self) -> None:
        """Give a new agent its duplicates."""
        for arena in self._by_name.values():
            self.announce(arena.hold(), [arena.fd])

    def listing(self) -> list[dict[str, Any]]:
        """For `list`."""
        return [
            {
                "run": arena.run,
                "name": arena.name,
                "size": arena.size,
                "scope": arena.scope,
                "users": sorted(arena.users),
            }
            for arena in self._by_name.values()
        ]

    def to_state(self) -> list[dict[str, Any]]:
        """For a successor program: descriptors by number."""
        return [
            {
                "fd": arena.fd,
                "run": arena.run,
                "name": arena.name,
                "size": arena.size,
                "scope": arena.scope,
                "users": sorted(arena.users),
            }
            for arena in self._by_name.values()
        ]

    def take_state(self, state: list[dict[str, Any]]) -> None:
        """Go on with the predecessor's descriptors."""
        for entry in state:
            arena = Arena(entry["run"], entry["name"], entry["size"], entry["scope"], entry["fd"])
            arena.users = set(entry["users"])
            self._by_name[arena.run, arena.name] = arena

    def _drop_user(self, arena: Arena, user: str) -> None:
        arena.users.discard(user)
        # One without memory holds nothing: its maker could not get any, and its name must not stay taken with a size that nobody can have.
        is_empty = os.fstat(arena.fd).st_blocks == 0
        if not arena.users and (arena.scope == "process" or is_empty):
            self._drop(arena)

    def _drop(self, arena: Arena) -> None:
        del self._by_name[arena.run, arena.name]
        os.close(arena.fd)
        self.announce(
            {"type": "unhold", "kind": "arena", "name": arena.hold()["name"], "run": arena.run}, []
        )


class Blobs:
    """Sealed memfds by digest: environments and secrets, never on disk."""

    def __init__(self) -> None:
        self._by_name: dict[str, int] = {}
        self.announce: Callable[[dict[str, Any], list[int]], None] = lambda frame, fds: None

    def put(self, name: str, data: str) -> None:
        """Keep it; again is fine, a digest names one content."""
        if not name or len(name) > _MOST_NAME:
            raise ArenaError(f"a blob's name has 1 to {_MOST_NAME} characters, not {len(name)}")
        if name in self._by_name:
            return
        try:
            self._by_name[name] = sealed_memfd(
                "argosy:blob", data.encode("utf-8", "surrogateescape")
            )
        except OSError as error:
            raise ArenaError(f"blob {name!r} of {len(data)} characters: {error.strerror}")
        self._hold(name)

    def get(self, name: str) -> bytes:
        """Its content; raises ArenaError when there is none."""
        return read_memfd(self.descriptor(name))

    def descriptor(self, name: str) -> int:
        """The keeper's own descriptor; raises ArenaError when there is none."""
        fd = self._by_name.get(name)
        if fd is None:
            raise ArenaError(f"no blob {name!r} is kept here")
        return fd

    def drop(self, name: str) -> None:
        """Forget it; again is fine."""
        fd = self._by_name.pop(name, None)
        if fd is not None:
            os.close(fd)
            self.announce({"type": "unhold", "kind": "blob", "name": name}, [])

    def adopt(self, frame: dict[str, Any], fd: int) -> None:
        """Take over a duplicate that another process held for a dead keeper."""
        name = str(frame.get("name", ""))
        if name in self._by_name:
            os.close(fd)
        else:
            self._by_name[name] = fd

    def hold_all(self) -> None:
        """Give a new agent its duplicates."""
        for name in self._by_name:
            self._hold(name)

    def listing(self) -> list[str]:
        """For `list`."""
        return sorted(self._by_name)

    def to_state(self) -> dict[str, int]:
        """For a successor program: descriptors by number."""
        return dict(self._by_name)

    def take_state(self, state: dict[str, int]) -> None:
        """Go on with the predecessor's descriptors."""
        self._by_name.update(state)

    def _hold(self, name: str) -> None:
        fd = self._by_name[name]
        size = os.fstat(fd).st_size
        frame = {"type": "hold", "kind": "blob", "name": name, "run": "", "scope": "", "size": size}
        self.announce({**frame, "fds": 1}, [fd])
