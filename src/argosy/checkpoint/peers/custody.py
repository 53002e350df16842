"""Who keeps what for whom, which losses can be made good, and how: decided from lists of hosts and from what holders say they have.

*Buddy*: a host's part lies whole on one other host. *Parity*: hosts form groups; each has its own part in memory and the exclusive or of one piece of
every other member's, so that one host of a group may be lost for 1/(n-1) more memory. Pure; copies.py and recalls.py carry it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from argosy.checkpoint.peers.labels import CHUNK_BYTES, Address, Label
from argosy.errors import ConfigError

Scheme = Literal["buddy", "parity"]


class Keeping(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of an owner's part that a host is to keep."""

    host: str
    members: tuple[str, ...]
    start: int
    stop: int
    is_folded: bool = False


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch in the memory of a host."""

    host: str
    address: Address
    start: int
    stop: int


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a part: the exclusive or of these pieces, of which some may be shorter; those that are missing are zeros."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One way to get all of a part."""

    stretches: tuple[Stretch, ...]

    @property
    def hosts(self) -> list[str]:
        """Those that must answer."""
        return sorted({piece.host for one in self.stretches for piece in one.pieces})


def groups_of(hosts: Sequence[str], group_size: int) -> list[tuple[str, ...]]:
    """Groups of at least so many hosts; neighbours, which often fail together, are in different ones where there are several."""
    check(hosts, group_size)
    count = len(hosts) // group_size
    return [tuple(hosts[number::count]) for number in range(count)]


def buddy_of(hosts: Sequence[str], host: str) -> str:
    """Half of the list away: neighbours often fail together."""
    check(hosts, 2)
    return hosts[(hosts.index(host) + len(hosts) // 2) % len(hosts)]


def plan_keepings(
    hosts: Sequence[str], owner: str, part_bytes: int, scheme: Scheme, group_size: int = 2
) -> list[Keeping]:
    """Where the owner's part is to be put; of a parity the whole in the owner's own memory comes first."""
    if scheme == "buddy":
        buddy = buddy_of(hosts, owner)
        return [Keeping(host=buddy, members=(owner,), start=0, stop=part_bytes)]
    members = next(one for one in groups_of(hosts, group_size) if owner in one)
    others = [host for host in members if host != owner]
    size = -(-part_bytes // len(others))
    size = -(-size // CHUNK_BYTES) * CHUNK_BYTES
    found = [Keeping(host=owner, members=members, start=0, stop=part_bytes)]
    for number, host in enumerate(others):
        start, stop = min(part_bytes, number * size), min(part_bytes, (number + 1) * size)
        found.append(Keeping(host=host, members=members, start=start, stop=stop, is_folded=True))
    return found


def check(hosts: Sequence[str], group_size: int) -> None:
    """ConfigError when hosts cannot keep anything for each other."""
    if len(set(hosts)) != len(hosts) or not all(hosts):
        raise ConfigError(f"hosts {list(hosts)}", fix="name each host once")
    if group_size < 2:
        raise ConfigError(f"a group of {group_size}", fix="use at least 2 hosts")
    if len(hosts) < group_size:
        raise ConfigError(
            f"{len(hosts)} hosts cannot form a group of {group_size}",
            fix="name more hosts, or use smaller groups",
        )


def is_recoverable(
    hosts: Sequence[str], owner: str, lost: Iterable[str], scheme: Scheme, group_size: int = 2
) -> bool:
    """Whether the owner's part is in memory somewhere after the loss of these hosts."""
    gone = set(lost)
    if scheme == "buddy":
        return buddy_of(hosts, owner) not in gone
    members = next(one for one in groups_of(hosts, group_size) if owner in one)
    return owner not in gone or gone.isdisjoint(host for host in members if host != owner)


def plan_sources(there: Mapping[str, Sequence[Label]], wanted: Label) -> list[Source]:
    """Ways to get the part that a label is a stretch of, the cheapest first; nothing when there is too little of it."""
    found = [_from_whole(host, label) for host, label in _wholes(there, wanted)]
    rebuilt = _from_parity(there, wanted)
    return [*found, *([] if rebuilt is None else [rebuilt])]


def _wholes(there: Mapping[str, Sequence[Label]], wanted: Label) -> list[tuple[str, Label]]:
    """The owner's own memory first."""
    hosts = sorted(there, key=lambda host: (host != wanted.owner, host))
    return [
        (host, label)
        for host in hosts
        for label in there[host]
        if label.is_whole and _is_same_part(label, wanted)
    ]


def _from_whole(host: str, label: Label) -> Source:
    piece = Piece(host=host, address=_address(label), start=label.start, stop=label.stop)
    stretch = Stretch(start=label.start, stop=label.stop, pieces=(piece,))
    return Source(stretches=(stretch,))


def _from_parity(there: Mapping[str, Sequence[Label]], wanted: Label) -> Source | None:
    """Of each stretch: the parity it is in, without the other members' that are in it too."""
    stretches = []
    for host in sorted(there):
        own = [one for one in there[host] if one.is_folded and _is_same_part(one, wanted)]
        if not own:
            continue
        mine = own[0]
        folded = [label for label in there[host] if label.is_folded and _is_beside(label, mine)]
        if {label.owner for label in folded} != set(mine.members) - {host}:
            continue
        pieces = [
            Piece(
                host=host,
                address=msgspec.structs.replace(_address(mine), owner=""),
                start=0,
                stop=max(label.num_bytes for label in folded),
            )
        ]
        for label in folded:
            if label.owner == mine.owner:
                continue
            held = _wholes(there, label)
            if not held:
                return None
            at, whole = held[0]
            pieces.append(
                Piece(host=at, address=_address(whole), start=label.start, stop=label.stop)
            )
        stretches.append(Stretch(start=mine.start, stop=mine.stop, pieces=tuple(pieces)))
    stretches.sort(key=lambda one: (one.start, one.stop))
    return Source(stretches=tuple(stretches)) if _covers(stretches, wanted.part_bytes) else None


def _covers(stretches: Sequence[Stretch], num_bytes: int) -> bool:
    at = 0
    for one in stretches:
        if one.start > at:
            return False
        at = max(at, one.stop)
    return bool(stretches) and at >= num_bytes


def _is_same_part(label: Label, other: Label) -> bool:
    return (label.run, label.step, label.owner, label.share, label.image) == (
        other.run,
        other.step,
        other.owner,
        other.share,
        other.image,
    )


def _is_beside(label: Label, other: Label) -> bool:
    mine, others = (label.run, label.step, label.members), (other.run, other.step, other.members)
    return mine == others


def _address(label: Label) -> Address:
    return Address(run=label.run, step=label.step, members=label.members, owner=label.owner)
