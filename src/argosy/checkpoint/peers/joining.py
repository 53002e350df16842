"""A checkpointer's place among its peers: which part of each checkpoint is this host's, who copies it, and what the peers have.

Ranks of several hosts that save into one store have a part per host; the first rank of each host has it copied. No torch.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from argosy.checkpoint.boards import Group
from argosy.checkpoint.peers import notes
from argosy.checkpoint.peers.labels import Share
from argosy.checkpoint.peers.recalls import PeerListing
from argosy.checkpoint.peers.routes import Route
from argosy.checkpoint.peers.settings import Copying, Peers
from argosy.checkpoint.peers.unixroute import UnixRoute
from argosy.errors import ArgosyError, ConfigError

_LOG = logging.getLogger("argosy.checkpoint")


def route_of(peers: Peers) -> Route:
    """How these peers reach each other: all of them are on this machine."""
    return UnixRoute(peers)


class Joined:
    """This process among the peers; keeps its host's holder alive until it is closed."""

    def __init__(self, peers: Peers, group: Group, run: str, store: Path) -> None:
        hosts = [said.decode() for said in group.agree(peers.host.encode())]
        own = list(dict.fromkeys(hosts))
        unknown = [host for host in own if host not in peers.hosts]
        if unknown:
            raise ConfigError(
                f"rank {hosts.index(unknown[0])} is on {unknown[0]}, which is not among {list(peers.hosts)}",
                fix="give all ranks the same hosts",
            )
        name = peers.run or run or str(store.absolute())
        share = Share(index=own.index(peers.host), count=len(own))
        self.copying = Copying(peers=peers, run=name, share=share)
        self.is_first = hosts.index(peers.host) == group.rank
        """Whether it is this rank that has its host's part copied."""
        self._route = route_of(peers)
        self.listing = PeerListing(self._route, peers.hosts, name, own[0])
        if self.is_first:
            try:
                self._route.start(peers.host)
            except ArgosyError as failure:
                _LOG.warning("this host keeps nothing for its peers: %s", failure)

    def note(self, store: Path) -> None:
        """Write down whose the checkpoints of a store are, for those who look from outside."""
        notes.note(msgspec.structs.replace(self.copying.peers, run=self.copying.run), store)

    def close(self) -> None:
        """Go; what the holders have stays."""
        self._route.close()
