"""Proof that processes share a host's memory: a descriptor handed over and a nonce read back, never a guess.

`prove` runs on every rank of a group, over the group's store; its result names the ranks of each host and holds, for each local peer, a
process descriptor and a connection on which further descriptors are handed over. Bounded in time, without a thread. Never imports torch.
"""

from __future__ import annotations

import os
import socket
import time
import weakref

import msgspec

from argosy.errors import ArgosyError, ConfigError, PeerLost, ProtocolError, TimedOut
from argosy.move import handover
from argosy.move.proofs import Proof, Proven, Store


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    turn: int
    what: str


def prove(store: Store, rank: int, size: int, *, timeout: float) -> Locality:
    """Find out which ranks share this host. Collective: every rank of the group calls it the same number of times."""
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size}", fix="use a rank from 0 to size - 1")
    if size == 1:
        return Locality(0, Proven([[0]], {}, {}, {}))
    proof = Proof(store, rank, size, time.monotonic() + timeout)
    try:
        proven = proof.run()
    except BaseException:
        proof.close_all()
        raise
    finally:
        proof.close_own()
    return Locality(rank, proven)


class Locality:
    """Which ranks share which host, and the local peers' descriptors; close it when the group ends."""

    def __init__(self, rank: int, proven: Proven) -> None:
        self.rank = rank
        self.groups = proven.groups
        """Ranks by host, each ascending, its leader first; hosts by their leaders."""
        self.group = next(group for group in self.groups if rank in group)
        """The ranks of this host."""
        self.pidfds = proven.pidfds
        """By rank of this host's other ranks; -1 for one that cannot be watched. They belong to this object."""
        self.reasons = proven.reasons
        """Why a rank is not local, by rank."""
        self.names = list(range(sum(map(len, self.groups))))
        """By rank: what errors call it, for whoever has other numbers."""
        self._connections = proven.connections
        self._turn = 0
        # One that nobody closes still gives its process descriptors back; sockets do so by themselves.
        self._closer = weakref.finalize(self, handover.close_all, list(self.pidfds.values()))
        self._closer.atexit = False

    def __repr__(self) -> str:
        return f"<locality of rank {self.rank}: {self.groups}>"

    @property
    def leader(self) -> int:
        """First rank of this host."""
        return self.group[0]

    @property
    def is_leader(self) -> bool:
        """Whether this is it."""
        return self.rank == self.leader

    def watched(self) -> list[int]:
        """Pidfds by position in `group`, -1 for this process: what a bounded wait looks at."""
        return [self.pidfds.get(rank, -1) for rank in self.group]

    def share(self, descriptor: int | None = None, *, timeout: float) -> int:
        """Hand the leader's descriptor to all ranks of this host; the result belongs to the caller. Collective on the host."""
        if self.is_leader != (descriptor is not None):
            raise ConfigError(
                f"share: rank {self.rank} {'has' if self.is_leader else 'gave'} "
                f"{'no descriptor' if self.is_leader else 'one'}, the leader is rank {self.leader}",
                fix="the leader gives a descriptor, the others None",
            )
        self._turn += 1
        if descriptor is None:
            return self._receive(self.leader, "share", time.monotonic() + timeout)
        for member in self.group[1:]:
            self._send(member, "share", descriptor)
        return os.dup(descriptor)

    def share_all(self, descriptor: int, *, timeout: float) -> dict[int, int]:
        """Hand each rank's descriptor to all others of this host; by rank, this one's included. Collective on the host."""
        self._turn += 1
        others = [peer for peer in self.group if peer != self.rank]
        for peer in others:
            self._send(peer, "share_all", descriptor)
        received: dict[int, int] = {}
        deadline = time.monotonic() + timeout
        try:
            for peer in others:
                received[peer] = self._receive(peer, "share_all", deadline)
            received[self.rank] = os.dup(descriptor)
        except (ArgosyError, OSError):
            handover.close_all(received.values())
            raise
        return dict(sorted(received.items()))

    def check_alive(self) -> None:
        """Raise PeerLost when a process of this host has ended."""
        for peer, pidfd in self.pidfds.items():
            if pidfd >= 0 and handover.has_ended(pidfd):
                raise PeerLost(self.names[peer])

    def close(self) -> None:
        """Close connections and process descriptors. Again is fine."""
        for pair in self._connections.values():
            for connection in pair:
                connection.close()
        self._closer()
        self._connections, self.pidfds = {}, {}

    def __enter__(self) -> Locality:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, peer: int, what: str, descriptor: int) -> None:
        text = msgspec.json.encode(_Share(turn=self._turn, what=what))
        try:
            handover.send(self._pair(peer)[0], text, descriptor)
        except BlockingIOError:
            raise TimedOut(
                f"rank {self.names[peer]} has left all shared descriptors unread",
                fix="call share on all ranks",
            )
        except OSError:
            raise PeerLost(self.names[peer], what)

    def _receive(self, peer: int, what: str, deadline: float) -> int:
        connection = self._pair(peer)[1]
        while True:
            # Asked first: what it has sent before its end is taken. Its connection may live on in a child.
            has_ended = handover.has_ended(self.pidfds.get(peer, -1))
            try:
                message = handover.receive(connection)
            except OSError:
                raise PeerLost(self.names[peer], what)
            if message is not None:
                return self._take(peer, what, *message)
            if has_ended:
                raise PeerLost(self.names[peer], what)
            if not handover.wait_readable([connection], deadline):
                raise TimedOut(
                    f"rank {self.names[peer]} has shared nothing within the time",
                    fix="is it in the same call?",
                )

    def _take(self, peer: int, what: str, text: bytes, descriptor: int | None) -> int:
        wanted = _Share(turn=self._turn, what=what)
        if descriptor is not None and text == msgspec.json.encode(wanted):
            return descriptor
        handover.close_all([] if descriptor is None else [descriptor])
        raise ProtocolError(
            f"rank {self.names[peer]} sent {text[:80]!r}{'' if descriptor is not None else ' without a descriptor'}, "
            f"rank {self.names[self.rank]} expected {wanted}",
            fix="share in the same order on all ranks; a missing descriptor may mean: raise ulimit -n",
        )

    def _pair(self, peer: int) -> tuple[socket.socket, socket.socket]:
        pair = self._connections.get(peer)
        if pair is None:
            raise ConfigError(f"rank {peer} is not local, or the locality is closed")
        return pair
