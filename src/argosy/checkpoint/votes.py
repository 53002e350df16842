"""A save by several processes: each says what it holds, all compute the same plan, each writes its share and votes, the lowest rank commits.

What is said and what is planned is pure; the talk goes over a board in the staging directory. No training collective, so that a save may run beside
training and a dead rank ends in an error instead of a hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from argosy.checkpoint.layouts import Wanted
from argosy.checkpoint.manifests import Parent
from argosy.checkpoint.names import Kind
from argosy.checkpoint.shares import Holders
from argosy.checkpoint.tables import Written
from argosy.errors import MismatchError
from argosy.move.boxes import Box

SAID, HANDED, WRITES, SAME, VOTE = "said", "handed", "writes", "same", "vote"


class SaidTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as a process sees it; `boxes` None when it holds the whole."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Kind
    meaning: str | None
    boxes: tuple[Box, ...] | None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has to save."""

    rank: int
    step: int
    tensors: tuple[SaidTensor, ...]
    aliases: dict[str, str]
    values: dict[str, Any]
    own_values: dict[str, Any]
    parent: Parent | None = None
    """The newest that this process knows to be durable; the lowest rank's counts."""
    host: str = ""
    pid: int = 0
    """Where it is, so that those who wait for it see when it has ended."""


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has written, flushed."""

    rank: int
    written: tuple[Written, ...]


# Made here: what a type is made of is looked up at its first use, which two threads must not do at once.
_SAID, _VOTE = msgspec.json.Decoder(Said), msgspec.json.Decoder(Vote)


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """The save as all see it."""

    wanted: tuple[Wanted, ...]
    meanings: dict[str, str | None]
    holders: dict[str, dict[int, tuple[Box, ...]]]
    aliases: dict[str, str]
    values: dict[str, Any]

    def as_holders(self) -> Holders:
        """For plan_shares."""
        return self.holders


def merge(said: Sequence[Said]) -> Common:
    """What all say together; MismatchError names the ranks that contradict each other."""
    first = said[0]
    wanted: dict[str, tuple[int, SaidTensor]] = {}
    holders: dict[str, dict[int, tuple[Box, ...]]] = {}
    aliases: dict[str, str] = {}
    values: dict[str, Any] = dict(first.values)
    for one in said:
        if one.step != first.step:
            raise MismatchError(
                f"rank {one.rank} saves step {one.step}, rank {first.rank} step {first.step}",
                fix="save the same step on all ranks",
            )
        for tensor in one.tensors:
            rank, before = wanted.setdefault(tensor.name, (one.rank, tensor))
            if before is not tensor:
                _compare(rank, before, one.rank, tensor)
            boxes = tensor.boxes
            if boxes is None:
                boxes = (Box((0,) * len(tensor.shape), tensor.shape),)
            if any(box.volume for box in boxes):
                holders.setdefault(tensor.name, {})[one.rank] = boxes
        aliases |= one.aliases
        _merge_values(values, first, one)
    for name in set(aliases) & set(wanted):
        raise MismatchError(
            f"{name} is tied to {aliases[name]} on some ranks and not on others",
            fix="tie the same parameters on all ranks",
        )
    return Common(
        wanted=tuple(
            Wanted(name=t.name, dtype=t.dtype, shape=t.shape, kind=t.kind)
            for _, t in wanted.values()
        ),
        meanings={name: tensor.meaning for name, (_, tensor) in wanted.items()},
        holders=holders,
        aliases=aliases,
        values=values,
    )


def _compare(rank: int, before: SaidTensor, other: int, tensor: SaidTensor) -> None:
    for what in ("shape", "dtype", "kind", "meaning"):
        ours, theirs = getattr(tensor, what), getattr(before, what)
        if ours != theirs:
            raise MismatchError(
                f"{tensor.name}: rank {rank} has {what} {theirs}, rank {other} has {ours}",
                fix=f"give all ranks the same {what}",
            )


def _merge_values(values: dict[str, Any], first: Said, one: Said) -> None:
    for key in {*first.values, *one.values}:
        if first.values.get(key) != one.values.get(key):
            raise MismatchError(
                f"the value under {key!r} differs between rank {first.rank} and rank {one.rank}",
                fix="give the same on all ranks, or wrap it: PerRank(value)",
            )
    for key, tree in one.own_values.items():
        values.setdefault(key, {})[f"rank-{one.rank:05d}"] = tree


def all_written(votes: Sequence[Vote]) -> list[Written]:
    """Everything that was written, by whomever."""
    return [one for vote in votes for one in vote.written]


def encode(value: msgspec.Struct) -> bytes:
    """For the board."""
    return msgspec.json.encode(value)


def decode_said(data: Sequence[bytes]) -> list[Said]:
    """From the board, in the order of ranks: so every process merges alike."""
    return [_SAID.decode(one) for one in data]


def decode_votes(data: Sequence[bytes]) -> list[Vote]:
    """From the board."""
    return [_VOTE.decode(one) for one in data]


def keys_of(size: int) -> list[str]:
    """What a save posts, to be taken down before the commit."""
    return [
        f"{key}-{rank:05d}" for key in (SAID, HANDED, WRITES, SAME, VOTE) for rank in range(size)
    ]
