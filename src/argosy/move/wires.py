"""The few collectives that an exchange between hosts needs, over any torch.distributed backend: bounded, with Argosy's errors.

Gathers bytes of different lengths, sends each rank its own piece, spreads one rank's piece to all. They only move bytes; the adding is done elsewhere, in fixed order.
Every call ends by its deadline: TimedOut, or PeerLost when the backend says that a connection broke. Used by remote.py.
"""

from __future__ import annotations

import select
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from argosy.errors import PeerLost, TimedOut

_LEAST_SECONDS = 0.001


class Wire:
    """A process group with deadlines."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._members: dict[int, int] = {}
        self.sent_bytes = 0

    def watch(self, members: Mapping[int, int]) -> None:
        """Process descriptors of members on this host, to name who has ended; -1 for all others."""
        self._members = dict(members)

    def gather(self, text: bytes, what: str, deadline: float) -> list[bytes]:
        """Everybody's bytes, by rank."""
        own = torch.tensor([len(text)], dtype=torch.int64)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(sizes, own, self._group, True), what, deadline)
        lengths = [int(size) for size in sizes]
        most = max(1, *lengths)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text or b"\0"), dtype=torch.uint8)[
            : len(text)
        ]
        pieces = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
        self._run(lambda: dist.all_gather(pieces, padded, self._group, True), what, deadline)
        self.sent_bytes += most * (self.size - 1)
        return [
            piece[:length].numpy().tobytes() for piece, length in zip(pieces, lengths, strict=True)
        ]

    def exchange(
        self, pieces: Sequence[torch.Tensor], sizes: Sequence[int], what: str, deadline: float
    ) -> list[torch.Tensor]:
        """Send piece i to rank i, and return what each rank has sent here, of these numbers of elements."""
        given = torch.cat(list(pieces))
        received = torch.empty(sum(sizes), dtype=given.dtype)
        lengths = [piece.numel() for piece in pieces]
        self._run(
            lambda: dist.all_to_all_single(
                received, given, list(sizes), lengths, self._group, True
            ),
            what,
            deadline,
        )
        self.sent_bytes += given.element_size() * (given.numel() - lengths[self.rank])
        return list(torch.split(received, list(sizes)))

    def spread(self, piece: torch.Tensor, source: int, what: str, deadline: float) -> None:
        """Fill `piece` everywhere with what `source` has in it."""
        root = source if self._group is None else dist.get_global_rank(self._group, source)
        self._run(lambda: dist.broadcast(piece, root, self._group, True), what, deadline)
        if source == self.rank:
            self.sent_bytes += piece.element_size() * piece.numel()

    def _run(self, start: object, what: str, deadline: float) -> None:
        left = deadline - time.monotonic()
        try:
            work = start()  # type: ignore[operator]
            work.wait(timedelta(seconds=max(_LEAST_SECONDS, left)))
        except PeerLost as told:
            # The argosy backend tells the program's number of a rank; members have those of the group.
            raise PeerLost(_rank_in(self._group, told.rank), what)
        except (RuntimeError, ValueError) as failure:
            # Backends say why in words alone.
            text = str(failure).lower()
            lost = self._ended()
            if lost is None and ("timed out" in text or "timeout" in text):
                raise TimedOut(
                    f"{what}: not all ranks came in time",
                    fix="see where the others are (`argosy stacks`), or give more time",
                )
            raise PeerLost(-1 if lost is None else lost, f"{what} ({str(failure).splitlines()[0]})")

    def _ended(self) -> int | None:
        watch = select.poll()
        ranks = {descriptor: rank for rank, descriptor in self._members.items() if descriptor >= 0}
        for descriptor in ranks:
            watch.register(descriptor, select.POLLIN)
        ended = [ranks[descriptor] for descriptor, _ in watch.poll(0)] if ranks else []
        return min(ended, default=None)


def _rank_in(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None or rank < 0 else dist.get_group_rank(group, rank)
