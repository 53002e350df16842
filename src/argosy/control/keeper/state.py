"""What all parts of the keeper share: its identity, its directories, its tables.

Made once by `__main__`; every part takes it as its first argument. It holds, it does not act.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from argosy.control.keeper.arenas import Arenas, Blobs
from argosy.control.keeper.attempts import Attempt
from argosy.control.keeper.census import cluster_key, look_at, make_mark
from argosy.control.keeper.containment import Containment
from argosy.control.keeper.ends import Ends
from argosy.control.keeper.frames import Connection
from argosy.control.keeper.loop import Loop
from argosy.control.keeper.outbox import Outbox
from argosy.control.keeper.ports import Reservations
from argosy.control.keeper.records import Records

_MOST_ENDED = 20_000


@dataclass
class Before:
    """How the keeper itself was started: what children get back."""

    open_files: tuple[int, int]
    affinity: list[int]
    oom_score: int


@dataclass
class Keeper:
    """The keeper's identity and everything it keeps."""

    id: str
    directory: str
    runtime: str
    loop: Loop
    containment: Containment
    before: Before
    records: Records
    outbox: Outbox
    arenas: Arenas = field(default_factory=Arenas)
    blobs: Blobs = field(default_factory=Blobs)
    ports: Reservations = field(default_factory=Reservations)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Attempts that are over and acknowledged: never started again by a late duplicate."""
    ends: Ends = field(default_factory=Ends)
    linked: dict[tuple[str, str], dict[str, Attempt]] = field(default_factory=dict)
    """The attempts of each run and role that have a link."""
    guests: dict[str, dict[str, Attempt]] = field(default_factory=dict)
    """By attempt: the commands beside it that have not ended."""
    num_unended: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Attempts of each run and role that have not ended; without helpers."""
    listeners: dict[str, socket.socket] = field(default_factory=dict)
    agent: Connection | None = None
    services: dict[str, dict[str, int]] = field(default_factory=dict)
    """name -> pid and start time of agent and controller"""
    lock: int = -1
    pid: int = field(default_factory=os.getpid)
    born: float = field(default_factory=time.time)
    is_ending: bool = False
    cluster: str = ""
    """Short name of the cluster directory."""

    def __post_init__(self) -> None:
        self.cluster = cluster_key(self.directory)
        self.containment.lookout.turn_began = lambda: self.loop.woke_at

    @property
    def socket_path(self) -> str:
        """Where the keeper listens."""
        return f"{self.runtime}/keeper.sock"

    def mark(self, attempt: str) -> str:
        """The ARGOSY_MARK of an attempt."""
        return make_mark(self.cluster, self.id, attempt)

    def enter(self, attempt: Attempt) -> None:
        """Know it from now on."""
        self.attempts[attempt.attempt] = attempt
        if not attempt.is_helper and attempt.state != "exited":
            self.num_unended[attempt.run, attempt.role] += 1
            if attempt.is_guest:
                self.guests.setdefault(attempt.host, {})[attempt.attempt] = attempt

    def conclude(self, attempt: Attempt) -> None:
        """It has ended; again is fine."""
        was, attempt.state = attempt.state, "exited"
        if was != "exited" and not attempt.is_helper:
            self.num_unended[attempt.run, attempt.role] -= 1
            if not self.num_unended[attempt.run, attempt.role]:
                del self.num_unended[attempt.run, attempt.role]
            others = self.guests.get(attempt.host, {})
            others.pop(attempt.attempt, None)
            if not others:
                self.guests.pop(attempt.host, None)

    def guests_of(self, attempt: str) -> list[Attempt]:
        """The commands beside an attempt that have not ended."""
        return list(self.guests.get(attempt, {}).values())

    def live_of(self, run: str, role: str) -> list[Attempt]:
        """Attempts of a run and role that have not ended; looks at every attempt."""
        return [
            attempt
            for attempt in self.attempts.values()
            if attempt.run == run and attempt.role == role and attempt.is_live
        ]

    def is_known(self, attempt: str) -> bool:
        """It was ordered before, whatever became of it."""
        return attempt in self.attempts or attempt in self.ended

    def forget(self, attempt: str) -> None:
        """The exit is durable elsewhere; only the id stays, for a while."""
        if self.attempts.pop(attempt, None) is not None:
            self.ended[attempt] = None
            while len(self.ended) > _MOST_ENDED:
                self.ended.popitem(last=False)

    def write_record(self) -> None:
        """Say on disk who keeps this cluster, for sweeps after our death."""
        own = look_at(self.pid)
        content: dict[str, Any] = {
            "keeper": self.id,
            "pid": self.pid,
            "start": own.start if own is not None else 0,
            "runtime": self.runtime,
            "containment": self.containment.method,
            "root": self.containment.root,
            "memory_root": self.containment.memory_root,
            "services": self.services,
        }
        if not self.records.write_keeper(content):
            self.outbox.note(f"keeper.json could not be written ({self.records.last_error})")
