"""The memory that sources and destinations of one transfer lie in, and the check that nobody overwrites what another still reads.

Processes may map the same arena, so two tensors of two ranks can be one memory. Every rank tells its spans; all judge alike. Used by reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import torch

from argosy.errors import ConfigError
from argosy.move.boxes import Held, digest_of
from argosy.move.mapping import span_bytes
from argosy.move.placements import Local
from argosy.move.regions import Region


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file (by device and inode), or of a process's own memory (inode 0), that a local tensor covers."""

    device: int
    inode: int
    begin: int
    end: int
    name: str
    is_target: bool
    meaning: bytes
    """Equal for tensors that hold the same elements of a global tensor in the same way."""

    @staticmethod
    def of(
        tensor: torch.Tensor,
        found: tuple[Region, int] | None,
        local: Local,
        number: int,
        *,
        is_target: bool,
    ) -> Span:
        """The span of one local tensor."""
        device, inode, begin = 0, 0, tensor.data_ptr()
        if found is not None:
            device, inode, begin = found[0].device, found[0].inode, found[1]
        end = begin + span_bytes(tensor.shape, tensor.stride(), tensor.dtype)
        held: list[Held] = [held for held in local.held if held.buffer == number]
        meaning = digest_of((local.shape, local.dtype, held))
        return Span(device, inode, begin, end, local.name, is_target, meaning)


def check_spans(said: Sequence[Sequence[Span]]) -> None:
    """Refuse a destination that shares memory with a source, or with a destination of another meaning.

    The same tensor on both sides under one name is fine: nothing of it moves.
    """
    memories: dict[tuple[int, int, int], list[tuple[int, Span]]] = defaultdict(list)
    for rank, spans in enumerate(said):
        for span in spans:
            if span.begin < span.end:
                owner = rank if span.inode == 0 else -1
                memories[span.device, span.inode, owner].append((rank, span))
    for spans_here in memories.values():
        spans_here.sort(key=lambda pair: (pair[1].begin, pair[1].end, pair[0]))
        open_spans: list[tuple[int, Span]] = []
        for rank, span in spans_here:
            open_spans = [pair for pair in open_spans if pair[1].end > span.begin]
            for other_rank, other in open_spans:
                _check_pair(rank, span, other_rank, other)
            open_spans.append((rank, span))


def _check_pair(rank: int, span: Span, other_rank: int, other: Span) -> None:
    if not span.is_target and not other.is_target:
        return
    is_same = (span.begin, span.end, span.meaning) == (other.begin, other.end, other.meaning)
    if is_same and (span.is_target == other.is_target or span.name == other.name):
        return
    target, source = (span, other) if span.is_target else (other, span)
    ranks = (rank, other_rank) if span.is_target else (other_rank, rank)
    raise ConfigError(
        f"the destination {target.name} of rank {ranks[0]} shares memory with the "
        f"{'destination' if source.is_target else 'source'} {source.name} of rank {ranks[1]}",
        fix="give the destination memory of its own",
    )
