"""This rank's place among those that train together, and its way from one membership to the next.

A member that has ended is seen through its process descriptor; the others go on at once without it, as an interim of the same generation. When a new generation was told and all its members have
enlisted in the roster, everybody takes his place in it. That may happen at any point of a step: finished blocks stay valid, so nobody agrees on a moment.
Waits of the exchange look in here at short intervals. Called by transaction.py.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Protocol

from argosy.errors import GenerationChanged, PeerLost, TimedOut
from argosy.move.exchange import Exchange
from argosy.train import memberships
from argosy.train.roster import Roster, start_time

_LOOK_SECONDS = 0.02


class Place(Protocol):
    """A place in a generation."""

    generation: int
    rank: int
    world_size: int


class Gang(Protocol):
    """What the runtime tells this process; `worker.gang.Gang`."""

    rank: int
    world_size: int

    @property
    def generation(self) -> int:
        """The generation that this process has its place in."""

    def coming(self) -> Place | None:
        """The newest generation told and not taken."""

    def lost_in(self, generation: int) -> frozenset[int]:
        """Ranks of a generation that have ended, also those that have never taken their place in it."""

    def take(self) -> None:
        """Take the place in it."""

    def suspect(self, rank: int, reason: str, *, pid: int = 0) -> None:
        """Ask for a rank to be killed and reaped."""

    def warn(self, text: str) -> None:
        """Tell of something that the run has survived."""

    def fail(self, reason: str, *, rank: int | None = None) -> None:
        """Ask for the run to be ended."""

    def entered(self) -> None:
        """Tell that this process is about to train."""

    @property
    def stopping(self) -> bool:
        """Whether this process was asked to stop."""


Waits = Callable[[Callable[[float], None], Callable[[], list[int]]], None]
"""`patience.wait`: calls the first with deadlines until it returns, and looks at the ranks that the second names."""


class Moved(Exception):
    """The membership has changed, or is about to: settle, then look at the step again."""


class Stopped(Exception):
    """The run is to stop at the committed version."""


class Crew:
    """Members of the current generation or interim, as this rank knows them."""

    def __init__(self, gang: Gang, roster: Roster, exchange: Exchange) -> None:
        self.gang = gang
        self.roster = roster
        self._exchange = exchange
        self.members: tuple[int, ...] = ()
        self.is_interim = False
        self.heeds_stops = True
        """Whether a wish to stop ends any wait; without recovery it waits for the end of the step."""
        self.num_moves = 0
        self._descriptors: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._generation = -1
        self._told = ""
        exchange.interrupt = self.look

    @property
    def rank(self) -> int:
        """This process's rank in the current generation."""
        return self.gang.rank

    @property
    def position(self) -> int:
        """Place among the living members."""
        return self.members.index(self.gang.rank)

    @property
    def is_first_living(self) -> bool:
        """Whether all members before this rank have ended. One that has no place yet leaves the precedence to all who have trained."""
        if not self.members:
            own = self.gang.generation, self.gang.rank, os.getpid()
            return memberships.is_foremost(self.roster.muster.first_places(), own)
        ended = self._ended()
        return all(rank in ended for rank in self.members if rank < self.gang.rank)

    @property
    def is_looping_elsewhere(self) -> bool:
        """Whether another process lives that has enlisted, be it for another generation, and has not left its loop."""
        pids = {pid for _, _, pid in self.roster.muster.last_places()} - {os.getpid()}
        return not all(map(self.roster.has_left_loop, pids))

    def pid_of(self, rank: int) -> int:
        """Process id of a member; 0 if unknown."""
        return self._pids.get(rank, 0)

    def look(self) -> None:
        """Raise Moved or Stopped when this rank must not wait any longer; cheap."""
        self.roster.beat(self.gang.rank)
        self.check_stop()
        if self._is_next_ready():
            raise Moved

    def settle(self, wait: Waits) -> None:
        """Enter the newest membership that is there, and return when all its members have; `wait` bounds it."""
        self.num_moves += 1
        while True:
            self.look_for_next()
            if self._generation != self.gang.generation and not self._meet():
                wait(self._wait_ready, self._late_veterans)
                continue
            found = memberships.form(self.gang.generation, self.gang.world_size, self._ended())
            self.members, self.is_interim = found.members, found.is_interim
            living = {rank: self._descriptors[rank] for rank in self.members}
            try:
                self._enter(wait, found.number, living)
                return
            except (PeerLost, Moved):
                continue  # look again: somebody ended, or a newer generation is complete
            except GenerationChanged:
                # The others are in a generation that this process has not taken: it comes, when all are ready for the newest one.
                self.look()
                time.sleep(_LOOK_SECONDS / 4)

    def _wait_ready(self, deadline: float) -> None:
        """A newcomer waits for all others of its generation, or for a newer one."""
        while not (self._can_meet() or self._is_next_ready()):
            self.check_stop()
            if time.monotonic() >= deadline:
                raise TimedOut(f"not all ranks are ready for generation {self.gang.generation}")
            time.sleep(_LOOK_SECONDS / 4)

    def _late_veterans(self) -> list[int]:
        places = self.roster.muster.last_places()
        self._pids = memberships.late_veterans(places, self.gang.generation)
        return list(self._pids)

    def _enter(self, wait: Waits, number: int, living: dict[int, int]) -> None:
        def enter(deadline: float) -> None:
            self._exchange.enter(number, self.gang.rank, living, deadline=deadline)

        wait(enter, lambda: self._exchange.late(number, living))

    def hear(self) -> None:
        """Something was told; from the link's thread.

        Who trains already is ready for any generation. Should it finish before it takes its place, newcomers find a member that has ended.
        """
        coming = self.gang.coming()
        if coming is not None and self._generation >= 0:
            self.roster.enlist(coming.generation, coming.rank)
        self._exchange.wake()

    def look_for_next(self) -> None:
        """Take the place in a newer generation when all of it have enlisted."""
        if self._is_next_ready():
            self.gang.take()

    def tell(self, text: str) -> None:
        """What all members find alike is told by one of them, once."""
        if text and text != self._told and self.is_first_living:
            self.gang.warn(text)
        self._told = text or self._told

    def close(self) -> None:
        """Give the process descriptors back."""
        self._exchange.interrupt = None
        for descriptor in self._descriptors.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptors = {}

    def check_stop(self) -> None:
        """Raise Stopped if a member was asked to stop."""
        if not self.heeds_stops:
            return
        generation = self.gang.generation
        if self.gang.stopping:
            self.roster.stop(generation)
        if self.roster.is_stopping(generation):
            raise Stopped

    def _is_next_ready(self) -> bool:
        coming = self.gang.coming()
        if coming is None:
            return False
        if self.roster.process_of(coming.generation, coming.rank) is None:
            self.roster.enlist(coming.generation, coming.rank)
        return self._is_complete(coming.generation, coming.world_size)

    def _is_complete(self, generation: int, world_size: int) -> bool:
        return memberships.is_complete(
            world_size,
            lambda rank: self.roster.has_enlisted(generation, rank),
            self.gang.lost_in(generation),
        )

    def _can_meet(self) -> bool:
        return self._is_complete(self.gang.generation, self.gang.world_size)

    def _meet(self) -> bool:
        """Open descriptors of all members of this generation; False while some have not enlisted."""
        generation = self.gang.generation
        if self.roster.process_of(generation, self.gang.rank) is None:
            self.roster.enlist(generation, self.gang.rank)
        self.check_stop()
        gone = self.gang.lost_in(generation)
        if not self._can_meet():
            return False
        self._forget()
        for rank in range(self.gang.world_size):
            found = self.roster.process_of(generation, rank)
            if found is None and rank not in gone:
                return False
            # One that has finished before it could take its place has no row: it is a member that has ended.
            pid, start = found or (0, 0)
            self._pids[rank] = pid
            self._descriptors[rank] = -1 if rank == self.gang.rank else _open(pid, start)
        self._generation = generation
        return True

    def _forget(self) -> None:
        for descriptor in self._descriptors.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptors, self._pids = {}, {}

    def _ended(self) -> frozenset[int]:
        """Members that have ended. Looked at until two looks agree: all see the same sets, one growing out of the other."""
        seen: frozenset[int] | None = None
        while True:
            found = frozenset(
                r for r, fd in self._descriptors.items() if fd == _GONE or _has_ended(fd)
            )
            if found == seen:
                return found
            seen = found


_GONE = -2


def _open(pid: int, start: int) -> int:
    """A descriptor of exactly that process; _GONE when it is no longer there."""
    if not pid:
        return _GONE
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return _GONE
    if start_time(pid) != start:
        os.close(descriptor)
        return _GONE
    return descriptor


def _has_ended(descriptor: int) -> bool:
    if descriptor < 0:
        return False
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(0))
