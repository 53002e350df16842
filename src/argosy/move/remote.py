"""The exchange of a training step between processes that share no memory: the interface of exchange.py over torch.distributed.

Each process keeps its blocks and its words in memory of its own. Waits are collectives that all ranks of the group call in the same order: headers are
gathered, pages go to their owners by all-to-all and are added there in the canonical order, votes and done pages are gathered, refreshed weights
are spread. The bits are those of the local exchange. A lost rank ends the call with PeerLost or TimedOut; its blocks and its state are lost with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

import msgspec
import torch
import torch.distributed as dist

from argosy.errors import ConfigError, MismatchError, TimedOut
from argosy.move import arenas, trees
from argosy.move.exchange import REGION, Exchange
from argosy.move.gathered import Gathered, add_pages, gather
from argosy.move.headers import Block, Contents
from argosy.move.layout import Layout
from argosy.move.rounds import Round
from argosy.move.trees import Node
from argosy.move.versions import Versions
from argosy.move.wires import Wire
from argosy.move.words import Memory, Progress

_BATCH_ELEMENTS = 1 << 20
"""Elements per block that one all-to-all carries for each owner: bounds the memory for pieces on their way."""


_LONGEST_SECONDS = 1800.0


class _Offer(msgspec.Struct, frozen=True):
    node: tuple[int, int]
    contents: Contents


class _Votes(msgspec.Struct, frozen=True):
    pages: list[int]
    words: list[bytes]


def open(name: str, layout: Layout, *, group: dist.ProcessGroup | None = None) -> RemoteExchange:
    """This process's part in an exchange over `group` (the default group, if None)."""
    wire = Wire(group)
    # A rank keeps its own lanes only; siblings are added into one slot when room is needed.
    lanes = -(-layout.num_lanes // wire.size)
    own = msgspec.structs.replace(layout, num_slots=0, most_ranks=max(layout.most_ranks, wire.size))
    least = min(own.slots, max(lanes // 2 + 2, own.most_ranks * lanes.bit_length()))
    own = msgspec.structs.replace(own, num_slots=least)
    arena = arenas.create(f"{name}@{wire.rank}.{os.getpid()}", own.places.total, scope="process")
    arena.empty((own.places.total,), torch.uint8, name=REGION)
    return RemoteExchange(arena, own, wire, layout.digest)


class RemoteVersions(Versions):
    """The versions of one process; it learns from the others which pages are done and refreshed."""

    def __init__(self, memory: Memory, progress: Progress, layout: Layout, wire: Wire) -> None:
        super().__init__(memory, progress, layout)
        self.wire = wire
        self._told_done: list[int] = []
        self._told_refreshed: list[int] = []

    def mark_done(self, version: int, pages: Sequence[int]) -> None:  # type: ignore[override]
        """These pages of `version` are written here."""
        self._told_done += pages
        super().mark_done(version, pages)

    def mark_refreshed(self, version: int, pages: Sequence[int]) -> None:  # type: ignore[override]
        """The weights of these pages are those of `version` here; `wait_refreshed` spreads them."""
        self._told_refreshed += pages
        super().mark_refreshed(version, pages)

    def wait_done(self, round: Round, *, deadline: float) -> None:
        """Learn which pages all ranks have done; TimedOut when some of the round's are missing."""
        self._share_done(round.version + 1, deadline)
        if not self.is_over(round):
            raise self._not_done(round.version + 1)

    def wait_flip(self, version: int, *, deadline: float) -> int:
        """Learn which pages all ranks have done, and commit `version`; its slot."""
        self._share_done(version, deadline)
        if not self.try_flip(version):
            raise self._not_done(version)
        return super().wait_flip(version, deadline=deadline)

    def wait_refreshed(
        self, version: int, *, deadline: float, weights: torch.Tensor | None = None
    ) -> None:
        """Spread the pages that each rank has refreshed into everybody's `weights`, a flat tensor over the whole space."""
        if weights is None or weights.dim() != 1 or weights.numel() != self._layout.num_elements:
            raise ConfigError(
                "between hosts wait_refreshed needs the weights",
                fix=f"give a flat tensor of {self._layout.num_elements} elements",
            )
        told = self._share(self._told_refreshed, "refreshed pages", deadline)
        self._told_refreshed = []
        for rank, pages in enumerate(told):
            bounds = [self._layout.bounds(page) for page in pages]
            if not bounds:
                continue
            piece = torch.cat([weights[start:stop] for start, stop in bounds])
            self.wire.spread(piece, rank, f"weights of version {version}", deadline)
            if rank != self.wire.rank:
                for (start, stop), part in zip(
                    bounds,
                    torch.split(piece, [stop - start for start, stop in bounds]),
                    strict=True,
                ):
                    weights[start:stop].copy_(part)
                super().mark_refreshed(version, pages)
        if self.unrefreshed(version):
            raise self._not_refreshed(version)

    def _share_done(self, version: int, deadline: float) -> None:
        told = self._share(self._told_done, f"pages of version {version}", deadline)
        self._told_done = []
        for pages in told:
            super().mark_done(version, pages)

    def _share(self, pages: list[int], what: str, deadline: float) -> list[list[int]]:
        texts = self.wire.gather(msgspec.msgpack.encode(pages), what, deadline)
        return [msgspec.msgpack.decode(text, type=list[int]) for text in texts]


class RemoteExchange(Exchange):
    """The exchange over a process group. Every wait and every `reduce` is called by all ranks, in the same order."""

    def __init__(self, arena: arenas.Arena, layout: Layout, wire: Wire, digest: int) -> None:
        super().__init__(arena, layout)
        self._wire = wire
        self._digest = digest
        self.state: RemoteVersions = RemoteVersions(self._memory, self._progress, layout, wire)

    def regroup(self, group: dist.ProcessGroup | None) -> None:
        """Go on in a new process group, after members were lost or have joined; then `enter` the new generation."""
        self._wire = self.state.wire = Wire(group)

    def enter(
        self, generation: int, rank: int, members: Mapping[int, int], *, deadline: float
    ) -> None:
        """Take part in a generation as `rank` of the group; MismatchError when layouts or versions differ between ranks."""
        if rank != self._wire.rank or sorted(members) != list(range(self._wire.size)):
            raise ConfigError(
                f"rank {rank} of {sorted(members)} in a group of {self._wire.size}",
                fix="members are the ranks of the process group",
            )
        self._wire.watch(members)
        own = (generation, self._digest, self.state.current()[0])
        texts = self._wire.gather(msgspec.msgpack.encode(own), "entering", deadline)
        for other, text in enumerate(texts):
            theirs = msgspec.msgpack.decode(text, type=tuple[int, int, int])
            if theirs != own:
                raise MismatchError(
                    f"rank {rank} has generation {own[0]}, layout {own[1]:x}, version {own[2]}; "
                    f"rank {other} has generation {theirs[0]}, layout {theirs[1]:x}, version {theirs[2]}",
                    fix="give all ranks the same model, lanes and checkpoint",
                )
        super().enter(generation, rank, {rank: -1}, deadline=deadline)

    def wait_lanes(
        self, round: Round, *, deadline: float, owners: Sequence[int] | None = None
    ) -> Gathered:
        """Learn which blocks each rank has; TimedOut when they do not have all lanes."""
        own = {block.node: block for block in self._headers.cover(round)}
        contents_of_own = self._headers.contents(list(own.values()))
        offers = [
            _Offer((node.first, node.size), brought)
            for node, brought in zip(own, contents_of_own, strict=True)
        ]
        texts = self._wire.gather(msgspec.msgpack.encode(offers), str(round), deadline)
        blocks: dict[Node, Block] = {}
        contents: dict[Node, Contents] = {}
        for rank, text in enumerate(texts):
            for offer in msgspec.msgpack.decode(text, type=list[_Offer]):
                node = Node(*offer.node)
                if node not in blocks:
                    slot, seal = (own[node].slot, own[node].seal) if node in own else (-1, 0)
                    blocks[node] = Block(slot, node, seal, rank)
                    contents[node] = offer.contents
        missing = trees.missing(blocks, self.layout.num_lanes)
        if missing:
            whose = "" if owners is None else f" of ranks {sorted({owners[m] for m in missing})}"
            raise TimedOut(
                f"{round}: no rank has lanes {missing[:8]}{whose}",
                fix="publish them before waiting: between hosts nobody else will",
            )
        chosen = trees.cover(blocks, self.layout.num_lanes)
        return gather(
            round,
            [blocks[node] for node in chosen],
            [contents[node] for node in chosen],
            self.layout,
        )

    def wait_read(self, round: Round, *, deadline: float) -> None:
        """Wait for all ranks."""
        self._wire.gather(b"", f"{round}: reading", deadline)

    def reduce(
        self, gathered: Gathered, pages: Sequence[int], out: torch.Tensor, *, deadline: float = 0.0
    ) -> list[float]:
        """As the local one, but a collective: all-to-all of the pages that each rank asks for, then the ordered sum.

        Without a deadline it may take half an hour.
        """
        self._check_out(out)
        until = deadline or time.monotonic() + _LONGEST_SECONDS
        texts = self._wire.gather(
            msgspec.msgpack.encode([int(page) for page in pages]), "pages to add", until
        )
        wanted = [msgspec.msgpack.decode(text, type=list[int]) for text in texts]
        batches = [self._batches(asked) for asked in wanted]
        partials: list[float] = []
        for turn in range(max(len(asked) for asked in batches)):
            now = [asked[turn] if turn < len(asked) else [] for asked in batches]
            partials += self._add_batch(gathered, now, out, until)
        return partials

    def wait_votes(self, round: Round, *, deadline: float) -> list[float]:
        """Gather the votes of all ranks; TimedOut when some page has none."""
        mine = [
            page
            for page in self.layout.pages_of_part(round.part)
            if page not in set(self.unvoted(round))
        ]
        at = self.layout.places.vote_values
        words = [self._memory.load(at + 8 * page).to_bytes(8, "little") for page in mine]
        text = msgspec.msgpack.encode(_Votes(mine, words))
        for other in self._wire.gather(text, f"votes of {round}", deadline):
            votes = msgspec.msgpack.decode(other, type=_Votes)
            for page, word in zip(votes.pages, votes.words, strict=True):
                self._memory.store(at + 8 * page, int.from_bytes(word, "little"))
                self._memory.store(self.layout.places.vote_rounds + 8 * page, round.tag)
        if self.unvoted(round):
            raise self._no_votes(round)
        return super().wait_votes(round, deadline=deadline)

    def statistics(self) -> dict[str, float]:
        """Counts of this process, for telemetry."""
        return {**super().statistics(), "sent_bytes": self._wire.sent_bytes}

    def _batches(self, pages: Sequence[int]) -> list[list[int]]:
        """Pages in groups whose elements fit one all-to-all."""
        found: list[list[int]] = []
        room = 0
        for page in pages:
            start, stop = self.layout.bounds(page)
            if not found or room < stop - start:
                found.append([])
                room = _BATCH_ELEMENTS
            found[-1].append(page)
            room -= stop - start
        return found

    def _add_batch(
        self, gathered: Gathered, wanted: list[list[int]], out: torch.Tensor, deadline: float
    ) -> list[float]:
        own = [block for block in gathered.blocks if block.owner == self._wire.rank]
        nothing = torch.empty(0)
        pieces = []
        for pages in wanted:
            bounds = [self.layout.bounds(page) for page in pages]
            parts = [self.slot(block.slot)[start:stop] for block in own for start, stop in bounds]
            pieces.append(torch.cat(parts) if parts else nothing)
        self._headers.check(own)
        mine = wanted[self._wire.rank]
        lengths = [stop - start for start, stop in map(self.layout.bounds, mine)]
        held = [
            sum(block.owner == rank for block in gathered.blocks) for rank in range(self._wire.size)
        ]
        sizes = [count * sum(lengths) for count in held]
        received = self._wire.exchange(pieces, sizes, f"pages of {gathered.round}", deadline)
        # Each rank sends its blocks in lane order: the next block of its piece is the next of its blocks in the cover.
        streams = [
            iter(torch.split(piece, lengths * count) if lengths else ())
            for piece, count in zip(received, held, strict=True)
        ]
        rows = [[next(streams[block.owner]) for _ in mine] for block in gathered.blocks]
        partials = []
        for index, page in enumerate(mine):
            start, stop = self.layout.bounds(page)
            inputs = [row[index] for row in rows]
            whole, doubles = [(0, stop - start)], [page in self.layout.double_pages]
            partials += add_pages(out[start:stop], inputs, gathered.program, whole, doubles)
        return partials
