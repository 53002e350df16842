"""What each rank says of itself before locality is proven: versions, nonce, address, and hints that only save attempts.

Used by proofs.py; the kernel, not a card, says who a peer is. Never imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from argosy.errors import ProtocolError
from argosy.move import directory
from argosy.native import loader

PROTOCOL = 1
VERSIONS = {"protocol": PROTOCOL, "kernels": loader.ABI, "layout": directory.LAYOUT}


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank publishes of itself. Host and namespaces only save attempts; the nonce alone proves."""

    versions: dict[str, int]
    nonce: str
    address: str = ""
    why: str = ""
    host: str = ""
    network: str = ""
    processes: str = ""
    """Namespace of `pid`."""
    pid: int = 0
    started: str = ""


def describe_process(nonce: str, address: str, why: str) -> Card:
    """This process's card."""
    return Card(
        versions=VERSIONS,
        nonce=nonce,
        address=address,
        why=why,
        host=_read("/proc/sys/kernel/random/boot_id"),
        network=_namespace("net"),
        processes=_namespace("pid"),
        pid=os.getpid(),
        started=start_time(os.getpid()),
    )


def read_card(text: bytes, peer: int, rank: int) -> Card:
    """A peer's card; ProtocolError when it runs another version."""
    try:
        versions = msgspec.json.decode(text).get("versions")
        if versions == VERSIONS:
            return msgspec.json.decode(text, type=Card)
    except (msgspec.DecodeError, AttributeError):
        versions = None
    raise ProtocolError(
        f"rank {peer} speaks {_spell(versions)}, this one (rank {rank}) {_spell(VERSIONS)}",
        fix="install the same version of argosy for all ranks",
    )


def why_not_tried(own: Card, other: Card) -> str:
    """What makes an attempt pointless; empty when it is worth one."""
    if own.why or other.why:
        return own.why or other.why
    if own.host and other.host and own.host != other.host:
        return "it runs on another host"
    if own.network and other.network and own.network != other.network:
        return "it runs in another network namespace"
    return ""


def has_died(own: Card, other: Card) -> bool:
    """Whether a process that refuses connections is known to be gone."""
    if not own.processes or (own.host, own.processes) != (other.host, other.processes):
        return False
    return start_time(other.pid) != other.started


def start_time(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty when there is none, or it has ended and waits for its parent."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _spell(versions: Any) -> str:
    if not isinstance(versions, dict):
        return "something unreadable"
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
