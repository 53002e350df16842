"""A checkpoint's part of this host into the memory of hosts, as custody says. Called by the process that copies. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from argosy.checkpoint.folders import Folder
from argosy.checkpoint.peers import custody
from argosy.checkpoint.peers.custody import Keeping
from argosy.checkpoint.peers.images import Row
from argosy.checkpoint.peers.labels import Address, Label
from argosy.checkpoint.peers.routes import Fill, Route
from argosy.checkpoint.peers.settings import Copying
from argosy.errors import ArgosyError

_LOG = logging.getLogger("argosy.checkpoint")
Asked = dict[str, int]
"""Hosts that are to keep nothing for this one and have forgotten what was newer, each with the step that was copied last."""
Pace = Callable[[int], None]
"""Called before each block is read: rate caps, progress and deadlines live there."""


@dataclass(kw_only=True)
class Copied:
    """What it came to."""

    sent_bytes: int = 0
    found_bytes: int = 0
    """Of stretches that were there already."""


def copy(
    folder: Folder,
    route: Route,
    copying: Copying,
    pace: Pace = lambda num_bytes: None,
    asked: Asked | None = None,
) -> Copied:
    """Put this host's part of a checkpoint where it belongs; a host that cannot take its stretch keeps no other from theirs, and is raised in the end."""
    peers = copying.peers
    row = Row(folder)
    begin, end = copying.share.range_of(row.image.num_bytes)
    keepings = custody.plan_keepings(
        peers.hosts, peers.host, end - begin, peers.scheme, peers.group_size
    )
    done, failures = Copied(), list[ArgosyError]()
    route.start(peers.host)
    keepers = {one.host for one in keepings}
    others = [host for host in peers.hosts if host not in keepers]
    newest = _label(folder.step, copying, row, keepings[0])
    _take_back(route, newest, others, {} if asked is None else asked)

    def from_disk(start: int, into: memoryview) -> None:
        row.fill(begin + start, into)

    fill: Fill = from_disk
    for one in keepings:
        label = _label(folder.step, copying, row, one)
        try:
            sent = route.put(one.host, label, _shifted(fill, one.start, pace))
        except ArgosyError as failure:
            failures.append(failure)
            continue
        done.sent_bytes += sent
        done.found_bytes += label.num_bytes - sent
        if one.host == peers.host:
            # The rest comes from there: the disk is read once.
            fill = _from_memory(route, peers.host, label)
    if failures:
        raise failures[0]
    return done


def _take_back(route: Route, newest: Label, others: list[str], asked: Asked) -> None:
    """Whoever copies a step has gone back behind its newer ones. Hosts that get it see that; those that kept for this one among other hosts would offer them for ever."""
    for host in others:
        if host not in asked or newest.step <= asked[host]:
            try:
                route.forget(host, newest)
            except ArgosyError as failure:
                # Most likely it has nothing any more. It is asked again with the next step.
                _LOG.info("peers: %s", failure.what)
                asked.pop(host, None)
                continue
        asked[host] = newest.step


def _label(step: int, copying: Copying, row: Row, one: Keeping) -> Label:
    return Label(
        run=copying.run,
        step=step,
        owner=copying.peers.host,
        members=one.members,
        share=copying.share,
        image=row.image,
        start=one.start,
        stop=one.stop,
        is_folded=one.is_folded,
    )


def _shifted(fill: Fill, by: int, pace: Pace) -> Fill:
    def shifted(start: int, into: memoryview) -> None:
        pace(len(into))
        fill(by + start, into)

    return shifted


def _from_memory(route: Route, host: str, label: Label) -> Fill:
    address = Address(run=label.run, step=label.step, members=label.members, owner=label.owner)

    def from_memory(start: int, into: memoryview) -> None:
        route.get(host, address, start, into)

    return from_memory
