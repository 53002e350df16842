"""One rank's run through the proof of locality: publish a card, hand over a nonce, judge the peers', publish the verdicts.

Every rank reaches every peer that may be local and is reached by it, so each two have proven themselves to each other. Waits in slices that look at
the peers' process descriptors and the deadline; no thread. Called by locality.py. Never imports torch.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from argosy.errors import ArgosyError, ClusterError, PeerLost, TimedOut
from argosy.move import handover
from argosy.move.cards import Card, describe_process, has_died, read_card, why_not_tried

_FIRST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.001, 0.02
_EXIT_SECONDS = 1.0
_WHAT = "the proof of locality"


class Store(Protocol):
    """The part of torch.distributed's Store that is used here."""

    def set(self, key: str, value: str) -> None:
        """Publish."""

    def get(self, key: str) -> bytes:
        """Read what is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""

    def add(self, key: str, amount: int) -> int:
        """Count."""


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    rank: int


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    why: str = ""
    """Empty: the nonce was the published one."""


@dataclass(frozen=True)
class Proven:
    """The result; what it holds belongs to whoever gets it."""

    groups: list[list[int]]
    pidfds: dict[int, int]
    connections: dict[int, tuple[socket.socket, socket.socket]]
    """By rank: the one to send on, the one to receive on."""
    reasons: dict[int, str]


class Proof:
    """One rank's run through the proof: publish, hand over, judge, publish the verdicts."""

    def __init__(self, store: Store, rank: int, size: int, deadline: float) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self.store = store
        self.nonce = os.urandom(handover.NONCE_BYTES)
        self.listener: socket.socket | None = None
        self.memfd = -1
        self.cards: list[Card] = []
        self.outgoing: dict[int, socket.socket] = {}
        """Where this rank proves itself and hears the peer's verdict."""
        self.incoming: dict[int, socket.socket] = {}
        """Where a peer has proven itself."""
        self.strangers: list[socket.socket] = []
        """Accepted, their first message still to come."""
        self.pidfds: dict[int, int] = {}
        self.reasons: dict[int, str] = {}
        self.accepted: set[int] = set()
        """Peers that found this rank's nonce right."""
        self.prefix = ""

    def run(self) -> Proven:
        """All of it, or an error with nothing kept."""
        self.cards = self._exchange_cards()
        for peer in range(self.size):
            if peer != self.rank:
                self._reach(peer)
        while self._unsettled():
            self._turn()
        local = [peer for peer in self.outgoing if peer not in self.reasons]
        self._call("set", f"{self.prefix}/view/{self.rank}", msgspec.json.encode(local).decode())
        self._wait_keys("view")
        views = [
            set(
                msgspec.json.decode(self._call("get", f"{self.prefix}/view/{peer}"), type=list[int])
            )
            for peer in range(self.size)
        ]
        groups = group_by_host(views)
        return self._keep(next(group for group in groups if self.rank in group), groups)

    def _keep(self, group: list[int], groups: list[list[int]]) -> Proven:
        """Hand over what belongs to the group's peers, close the rest."""
        peers = [peer for peer in group if peer != self.rank]
        for peer in range(self.size):
            if peer not in group:
                self.reasons.setdefault(peer, "the proof holds with some ranks of its host alone")
        pairs = {peer: (self.outgoing.pop(peer), self.incoming.pop(peer)) for peer in peers}
        pidfds = {peer: self.pidfds.pop(peer, -1) for peer in peers}
        self.close_all()
        return Proven(groups, pidfds, pairs, self.reasons)

    # --- who is who ---------------------------------------------------------------------------

    def _exchange_cards(self) -> list[Card]:
        turn = self._call("add", f"argosy/locality/turns/{self.rank}", 1)
        self.prefix = f"argosy/locality/{turn}"
        address, why = "", ""
        try:
            self.memfd = handover.nonce_memfd(self.nonce)
            self.listener, address = handover.listen(self.size)
        except OSError as failure:
            why = f"rank {self.rank} can share no memory: {failure.strerror}"
        card = describe_process(self.nonce.hex(), address, why)
        self._call("set", f"{self.prefix}/card/{self.rank}", msgspec.json.encode(card).decode())
        self._wait_keys("card")
        return [
            read_card(self._call("get", f"{self.prefix}/card/{peer}"), peer, self.rank)
            for peer in range(self.size)
        ]

    def _wait_keys(self, kind: str) -> None:
        """Wait until all ranks have published; a local one that ends meanwhile is a PeerLost."""
        keys = {f"{self.prefix}/{kind}/{peer}": peer for peer in range(self.size)}
        pause = _FIRST_PAUSE_SECONDS
        while not self._call("check", list(keys)):
            for peer in self._ended():
                if not self._call("check", [f"{self.prefix}/{kind}/{peer}"]):
                    raise PeerLost(peer, _WHAT)
            if time.monotonic() >= self.deadline:
                missing = [peer for key, peer in keys.items() if not self._call("check", [key])]
                raise TimedOut(
                    f"ranks {missing} have not taken part in the proof of locality in time",
                    fix="all ranks of the group must call it, equally often; then make a new group",
                )
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)

    def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self.store, operation)(*arguments)
        except RuntimeError as failure:  # torch's errors of a store
            for peer in self._ended():
                raise PeerLost(peer, _WHAT)
            raise ClusterError(
                f"the group's store does not answer: {failure}",
                fix="the process that serves it has ended: its own output says why (in a run: `argosy why`)",
            )

    def _ended(self) -> list[int]:
        return [peer for peer, pidfd in self.pidfds.items() if handover.has_ended(pidfd)]

    # --- the proof ----------------------------------------------------------------------------

    def _reach(self, peer: int) -> None:
        """Connect to a peer that may be local, and hand over our nonce."""
        own, card = self.cards[self.rank], self.cards[peer]
        why = why_not_tried(own, card)
        if not why:
            try:
                connection = handover.connect(card.address)
            except OSError as failure:
                if has_died(own, card):
                    raise PeerLost(peer, _WHAT)
                why = f"no connection to it: {failure.strerror}"
            else:
                self.outgoing[peer] = connection
                uid, _ = handover.peer_of(connection)
                if uid != os.getuid():
                    why = f"it belongs to another user ({uid})"
                else:
                    self.pidfds[peer] = handover.watch_peer(connection)
                    self._say(peer, connection, _Hello(rank=self.rank), self.memfd)
        if why:
            self.reasons[peer] = why

    def _unsettled(self) -> set[int]:
        """Peers whose verdict or whose proof is still to come."""
        return {
            peer
            for peer in self.outgoing
            if peer not in self.reasons and not (peer in self.accepted and peer in self.incoming)
        }

    def _turn(self) -> None:
        """Wait for something and act on it."""
        assert self.listener is not None
        waiting = {peer: self.outgoing[peer] for peer in self._unsettled() - self.accepted}
        if not handover.wait_readable(
            [self.listener, *waiting.values(), *self.strangers], self.deadline
        ):
            raise TimedOut(
                f"ranks {sorted(self._unsettled())} have not finished the proof of locality in time",
                fix="`argosy stacks` shows where they are",
            )
        while (connection := handover.accept(self.listener)) is not None:
            self.strangers.append(connection)
        for connection in list(self.strangers):
            self._judge(connection)
        for peer, connection in waiting.items():
            self._hear(peer, connection)
        for peer in self._unsettled().intersection(self._ended()):
            raise PeerLost(peer, _WHAT)

    def _judge(self, connection: socket.socket) -> None:
        """Read a stranger's proof, if it is there, and answer."""
        try:
            message = handover.receive(connection)
        except OSError:
            self.strangers.remove(connection)
            connection.close()
            return
        if message is None:
            return
        self.strangers.remove(connection)
        text, descriptor = message
        peer, why = -1, "no descriptor arrived: raise the limit of open files (ulimit -n)"
        if descriptor is not None:
            peer, why = self._weigh(connection, text, handover.read_nonce(descriptor))
            os.close(descriptor)
        if peer < 0 or peer in self.incoming:
            connection.close()  # not one of ours
            return
        self.incoming[peer] = connection
        why = why or self.reasons.get(peer, "")
        if why:
            self.reasons[peer] = why
        self._say(peer, connection, _Verdict(why=why))

    def _weigh(self, connection: socket.socket, text: bytes, nonce: bytes) -> tuple[int, str]:
        """(rank, why its proof fails); rank -1 for somebody who is not of this group."""
        uid, _ = handover.peer_of(connection)
        try:
            peer = msgspec.json.decode(text, type=_Hello).rank
        except msgspec.DecodeError:
            return -1, ""
        if not 0 <= peer < self.size or peer == self.rank or uid != os.getuid():
            return -1, ""
        is_right = nonce.hex() == self.cards[peer].nonce
        return peer, "" if is_right else "the memory it handed over holds another nonce"

    def _hear(self, peer: int, connection: socket.socket) -> None:
        """Read a peer's verdict on our proof, if it is there."""
        try:
            message = handover.receive(connection)
        except OSError:
            raise self._lost(peer)
        if message is None:
            return
        text, descriptor = message
        handover.close_all([] if descriptor is None else [descriptor])
        why = msgspec.json.decode(text, type=_Verdict).why
        if why:
            self.reasons.setdefault(peer, why)
        self.accepted.add(peer)

    def _say(
        self,
        peer: int,
        connection: socket.socket,
        said: msgspec.Struct,
        descriptor: int | None = None,
    ) -> None:
        try:
            handover.send(connection, msgspec.json.encode(said), descriptor)
        except OSError:
            raise self._lost(peer)

    def _lost(self, peer: int) -> ArgosyError:
        """Its connection has ended: because the process has, or because it gave up, perhaps over another one's death."""
        until = time.monotonic() + _EXIT_SECONDS
        while time.monotonic() < until:
            # A dying process closes its sockets a moment before it counts as ended.
            ended = [rank for rank, pidfd in self.pidfds.items() if handover.has_ended(pidfd)]
            if ended:
                return PeerLost(peer if peer in ended else ended[0], _WHAT)
            time.sleep(_FIRST_PAUSE_SECONDS)
        return TimedOut(f"rank {peer} gave up the proof of locality", fix="its log says why")

    def close_all(self) -> None:
        """Everything that nobody has taken over."""
        for connection in (*self.outgoing.values(), *self.incoming.values(), *self.strangers):
            connection.close()
        handover.close_all(self.pidfds.values())
        self.outgoing, self.incoming, self.strangers, self.pidfds = {}, {}, [], {}

    def close_own(self) -> None:
        """The means of the proof."""
        if self.listener is not None:
            self.listener.close()
        if self.memfd >= 0:
            os.close(self.memfd)


def group_by_host(views: list[set[int]]) -> list[list[int]]:
    """Ranks by host, from what each rank has proven; the same result on all ranks. Each two of a group have proven each other."""
    groups: list[list[int]] = []
    for rank, view in enumerate(views):
        for group in groups:
            if all(other in view and rank in views[other] for other in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups
