"""The processes of a group on one host, which read for each other: what several of them want of a checkpoint comes from the disk once.

They enlist in the group's store when they join it, and say there what they want when they load. Nobody waits long for one that does not come; whatever
goes wrong with sharing means reading alone. A process uses bytes that it has checked or that the one who read them has checked before it showed them.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from argosy.checkpoint import sharing
from argosy.checkpoint.directio import ALIGNMENT, BLOCK_BYTES
from argosy.checkpoint.sharing import Need, Offer, Stretch, Wanted
from argosy.checkpoint.windows import Block, Window
from argosy.errors import ArenaGone, ClusterError, NoRoom

_LOG = logging.getLogger("argosy.checkpoint")
# Made here: what a type is made of is looked up at its first use, which two threads must not do at once.
_OFFERS, _WANTED = msgspec.msgpack.Decoder(Offer), msgspec.msgpack.Decoder(Wanted)
PATIENCE_SECONDS = 1.0
"""For one that has not said what it wants: ranks that load together come within milliseconds of each other."""
NUM_BLOCKS = 4
"""Of the windows of those that take turns, at least one each: what a process maps is 8 MiB for each of them, or 32 MiB."""


class Roll(Protocol):
    """A board that also counts who has come."""

    def enlist(self, name: str) -> int:
        """How many had enlisted under the name before."""

    def enlisted(self, name: str) -> int:
        """How many have."""

    def post(self, key: str, data: bytes) -> None:
        """Put it up."""

    def find(self, key: str) -> bytes | None:
        """What was posted, or None yet."""


class Neighbours:
    """This process among those of its group and host; each has a place, by the order in which they came."""

    def __init__(
        self, roll: Roll, host: str, *, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self.roll = roll
        self.host = host
        self.patience_seconds = patience_seconds
        self.place = roll.enlist(host)
        self._visits: Counter[str] = Counter()

    def visit(self, checkpoint: str) -> Visit:
        """A load of a checkpoint; all that load it together do so equally often."""
        self._visits[checkpoint] += 1
        return Visit(self, f"{self.host}/{checkpoint}-{self._visits[checkpoint]}")


@dataclass(frozen=True)
class Piece:
    """A stretch that one process reads and others take; `number` is its place in the offer."""

    stretch: Stretch
    number: int
    window: Window
    reader: int
    place: int
    """Of this process."""
    before: tuple[int, ...] = ()
    """Who took what was in its block before it."""

    @property
    def is_own(self) -> bool:
        """Whether this process reads it."""
        return self.reader == self.place

    def give(self, read: Callable[[Block], None], use: Callable[[int], None]) -> None:
        """Read it, which checks it, show it to the others, and use it."""
        window = self.window
        try:
            if self.before:
                window.wait_taken(self.number - window.num_blocks, self.place, self.before)
            block = window.begin(self.number)
            read(block)
            window.publish(self.number)
            use(block.address)
            window.take(self.number, self.place)
        except BaseException:
            window.end()
            # The threads beside this one must not wait for it.
            window.leave(self.place)
            raise

    def take(self, use: Callable[[int], None]) -> bool:
        """Use it when it is there; False when it must be read here, whatever has been used of it."""
        address = self.window.find(self.number, self.reader)
        if address is not None:
            use(address)
        is_whole = address is not None and self.window.is_held(self.number)
        self.window.take(self.number, self.place)
        return is_whole


class Visit:
    """One load, seen by one process; a context manager, within which the windows are open."""

    def __init__(self, neighbours: Neighbours, key: str) -> None:
        self._neighbours = neighbours
        self._place = neighbours.place
        self._key = key
        self._others: dict[int, Wanted] = {}
        self._own: Window | None = None
        self._last: list[Piece] = []
        self._windows: list[Window] = []

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if self._own is not None:
            if kind is None:
                for piece in self._last:
                    self._own.wait_taken(piece.number, self._place, piece.stretch.places)
            self._own.end()
            self._own.close()
        for window in self._windows:
            window.leave(self._place)
            window.close()

    def meet(self, needs: Mapping[str, Need]) -> list[Piece]:
        """What is shared, in the order in which all deal with it: by file and offset. The rest each reads alone."""
        needs = {name: need for name, need in needs.items() if len(need.chunks)}
        try:
            self._say("", sharing.wanted_of(os.getpid(), needs))
            missing = self._wait(self._hear_wanted, self._neighbours.patience_seconds)
            if missing:
                _LOG.info("%d ranks of this host have not said what they load", missing)
            self._keep_mutual()
            pieces = self._offer(needs)
        except ClusterError as failure:  # the board is gone
            _LOG.warning("ranks of this host cannot be asked what they load: %s", failure)
            return []
        try:
            pieces += self._accept(needs)
        except ClusterError as failure:
            # What was offered is read for the others all the same.
            _LOG.warning("ranks of this host cannot be asked what they read: %s", failure)
        return sorted(pieces, key=lambda one: (one.stretch.file, one.stretch.start, one.reader))

    def _keep_mutual(self) -> None:
        """Forget those that have not heard this process: they came before it, and do not wait for it."""
        self._post("/heard", msgspec.msgpack.encode(sorted(self._others)))
        heard: dict[int, list[int]] = {}

        def hear() -> int:
            for place in self._others.keys() - heard.keys():
                if (data := self._find(place, "/heard")) is not None:
                    heard[place] = msgspec.msgpack.decode(data, type=list[int])
            return len(self._others) - len(heard)

        # Who is waited for may itself still wait for a third.
        self._wait(hear, 2 * self._neighbours.patience_seconds)
        self._others = {
            place: wanted
            for place, wanted in self._others.items()
            if self._place in heard.get(place, ())
        }

    def _offer(self, needs: Mapping[str, Need]) -> list[Piece]:
        """What this process reads for others; said in any case, as some may wait for it."""
        stretches = sharing.plan_stretches(needs, self._place, self._others, BLOCK_BYTES)
        if stretches:
            measure = sharing.measure_of(stretches, NUM_BLOCKS, ALIGNMENT)
            try:
                self._own = Window.create(measure)
            except (NoRoom, OSError) as failure:
                _LOG.info("nothing is read for other ranks: %s", failure)
        if self._own is None:
            self._say("/offer", Offer())
            return []
        window = self._own
        window.watch({place: one.pid for place, one in self._others.items()})
        offer = Offer(
            pid=os.getpid(),
            descriptor=window.descriptor,
            nonce=window.nonce,
            measure=measure,
            stretches=stretches,
        )
        self._say("/offer", offer)
        pieces = []
        for number, stretch in enumerate(stretches):
            earlier = number - measure.num_blocks
            before = stretches[earlier].places if earlier >= 0 else ()
            pieces.append(Piece(stretch, number, window, self._place, self._place, before))
        self._last = pieces[-measure.num_blocks :]
        return pieces

    def _accept(self, needs: Mapping[str, Need]) -> list[Piece]:
        """What others read for this process."""
        offers: dict[int, Offer] = {}
        readers = [
            place for place, wanted in self._others.items() if sharing.is_common(needs, wanted)
        ]

        def hear() -> int:
            for place in readers:
                if place not in offers and (data := self._find(place, "/offer")) is not None:
                    offers[place] = _OFFERS.decode(data)
            return len(readers) - len(offers)

        self._wait(hear, 2 * self._neighbours.patience_seconds)
        return [piece for place, offer in offers.items() for piece in self._taken(place, offer)]

    def _taken(self, reader: int, offer: Offer) -> Iterable[Piece]:
        mine = [
            (number, stretch)
            for number, stretch in enumerate(offer.stretches)
            if self._place in stretch.places
        ]
        if not mine or offer.measure is None:
            return []
        try:
            window = Window.open(offer.pid, offer.descriptor, offer.nonce, offer.measure)
        except ArenaGone as failure:
            _LOG.warning("what another rank reads for this one is read again: %s", failure)
            return []
        window.watch({reader: offer.pid})
        self._windows.append(window)
        return [Piece(stretch, number, window, reader, self._place) for number, stretch in mine]

    def _hear_wanted(self) -> int:
        """Read what others have said by now; how many have said nothing."""
        count = self._neighbours.roll.enlisted(self._neighbours.host)
        for place in range(count):
            if place == self._place or place in self._others:
                continue
            data = self._find(place, "")
            if data is not None:
                self._others[place] = _WANTED.decode(data)
        return count - 1 - len(self._others)

    def _wait(self, hear: Callable[[], int], seconds: float) -> int:
        """Until nobody is missing, and for so long at most; how many are."""
        deadline = time.monotonic() + seconds
        pause = 0.0005
        while (missing := hear()) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(0.02, pause * 1.5)
        return missing

    def _say(self, what: str, said: Wanted | Offer) -> None:
        self._post(what, msgspec.msgpack.encode(said))

    def _post(self, what: str, data: bytes) -> None:
        self._neighbours.roll.post(f"{self._key}/{self._place}{what}", data)

    def _find(self, place: int, what: str) -> bytes | None:
        return self._neighbours.roll.find(f"{self._key}/{place}{what}")


def this_host() -> str:
    """Equal in processes that can map each other's memory: of one kernel, one table of processes and one user. Empty when this one's cannot be mapped."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        processes = os.readlink("/proc/self/ns/pid")
        # A process that lets nobody look into it does not own its own directory.
        is_open = os.stat("/proc/self/fd").st_uid == os.geteuid()
    except OSError:
        return ""
    return f"{boot}-{processes}-{os.geteuid()}" if is_open else ""
