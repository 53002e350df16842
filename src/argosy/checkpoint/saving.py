"""The way from a state to a committed checkpoint: plan, blocks, index, values, manifest, commit; alone or with others.

The checkpointer calls it for blocking saves, and `prepare` for those whose bytes the writer process sends. Whatever goes wrong leaves no staging
directory behind, and tells the other processes of the save.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec

from argosy.checkpoint import (
    boards,
    directio,
    names,
    records,
    tables,
    together,
    votes,
)
from argosy.checkpoint.boards import FileBoard, Group, PartnerFailed
from argosy.checkpoint.books import Book
from argosy.checkpoint.commits import Staging, Store
from argosy.checkpoint.gathering import TensorSource
from argosy.checkpoint.layouts import FileImage, Image, plan_image, plan_shards
from argosy.checkpoint.neighbours import this_host
from argosy.checkpoint.records import Facts, Outline
from argosy.checkpoint.shares import Duty, plan_boxes, plan_shares
from argosy.checkpoint.together import Settings
from argosy.checkpoint.turns import OtherStep, Turn
from argosy.checkpoint.votes import Common, Said, SaidTensor
from argosy.move.boxes import Box
from argosy.move.dtypes import itemsize


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A save that is planned and has its staging directory; not a byte is written yet."""

    staging: Staging
    outline: Outline
    duties: list[Duty]
    book: Book


class Plans:
    """The last plan of a group's saves: a state that keeps its form is planned once."""

    def __init__(self) -> None:
        self._form: tuple[Any, ...] = ()
        self._plan: tuple[Image, list[Duty]] | None = None

    def plan(self, common: Common, group: Group, settings: Settings) -> tuple[Image, list[Duty]]:
        """The image of all files, and what this process writes of them."""
        form = common.wanted, common.holders, group.rank, group.size, settings.shards
        if self._plan is None or form != self._form:
            self._form, self._plan = form, _plan(common, group, settings)
        return self._plan


def save(store: Store, facts: Facts, book: Book, settings: Settings) -> bytes:
    """By this process alone; the manifest's bytes."""
    data = save_together(store, facts, lambda: book, Group(), settings)
    assert data is not None
    return data


def save_together(
    store: Store,
    facts: Facts,
    gather: Callable[[], Book],
    group: Group,
    settings: Settings,
    plans: Plans | None = None,
    turn: Turn | None = None,
) -> bytes | None:
    """With the other members of a group, who all call it; the manifest's bytes on the rank that commits, None elsewhere.

    `gather` may fail: the others are then told why. `turn`: if it has begun before.
    """
    prepared = prepare(store, facts, gather, group, settings, plans, turn)
    staging, outline = prepared.staging, prepared.outline
    source = TensorSource(outline.image, prepared.book.entries)
    try:
        return together.write(staging, outline, prepared.duties, source, group, settings)
    except BaseException as failure:
        together.give_up(staging, group, failure)
        raise


def prepare(
    store: Store,
    facts: Facts,
    gather: Callable[[], Book],
    group: Group,
    settings: Settings,
    plans: Plans | None = None,
    turn: Turn | None = None,
) -> Prepared:
    """Plan a save with the other members of the group, up to the first byte."""
    # Alone, nobody need be told: then the store is locked and swept before anything is made in it.
    early = gather() if group.is_alone else None
    turn = turn or Turn(group)
    with turn.telling():
        turn.saves(facts.step)
        if group.rank != 0:  # it takes away what others may have made
            turn.check_refused()
        try:
            staging = store.stage(facts.step, turn.nonce)
        except FileNotFoundError:
            turn.check_refused()
            raise PartnerFailed("the save was given up by another rank", fix="see its own error")
    try:
        mine = said_by(group.rank, facts, book := early or gather())
        if group.rank == 0:
            # Before the others hear of this one: they wait for the step to appear.
            store.clear(facts.step)
        said = [mine]
        if not group.is_alone:
            board = FileBoard(staging.path)
            told = boards.exchange(board, votes.SAID, votes.encode(mine), group, turn.check)
            said = votes.decode_said(told)
        common = votes.merge(said)
        # Ranks may hear at different times what has become durable; what is linked must be the same for all.
        facts = msgspec.structs.replace(facts, parent=said[0].parent)
        image, duties = (plans or Plans()).plan(common, group, settings)
        if group.rank == 0:
            needed = _least_bytes(image, facts)
            directio.check_space(settings.files, staging.fd, needed, f"step {facts.step}")
        outline = records.outline_of(facts, image, common)
    except PartnerFailed as failure:
        # Whatever made it end here: of a save that somebody has refused nothing is left to be cleared up by rank 0.
        refusal = turn.refusal()
        if refusal is None:
            turn.refuse(failure)
            together.give_up(staging, group, failure)
            raise
        staging.abandon()
        raise refusal
    except OtherStep as failure:
        turn.refuse(failure)
        staging.abandon()  # nobody shares it
        raise
    except BaseException as failure:
        # Those that have not come yet will not find the directory any more.
        turn.refuse(failure)
        together.give_up(staging, group, failure)
        raise
    return Prepared(staging=staging, outline=outline, duties=duties, book=book)


def _least_bytes(image: Image, facts: Facts) -> int:
    """What will have to be written for certain: of frozen files the parent may have all. What is left is looked at again when that is known."""
    is_linkable = facts.parent is not None
    files = [file for file in image.files if not (is_linkable and file.kind == "frozen")]
    return sum(file.size for file in files)


def said_by(rank: int, facts: Facts, book: Book) -> Said:
    """A process's own part."""
    found = []
    for entry in book.entries:
        boxes: tuple[Box, ...] | None = tuple(entry.boxes)
        if len(entry.held) == 1 and entry.held[0].box.sizes == entry.shape:
            boxes = None
        found.append(
            SaidTensor(entry.name, entry.dtype, entry.shape, entry.kind, entry.meaning, boxes)
        )
    return Said(
        rank=rank,
        step=facts.step,
        tensors=tuple(found),
        aliases=book.aliases,
        values=book.values,
        own_values=book.own_values,
        parent=facts.parent,
        host=this_host(),
        pid=os.getpid(),
    )


def _plan(common: Common, group: Group, settings: Settings) -> tuple[Image, list[Duty]]:
    """The image of all files, and what this process writes of them."""
    if group.is_alone or not settings.shards:
        image = plan_image(common.wanted)
        return image, plan_shares(image, common.holders, range(group.size))[group.rank]
    sizes = [(one.name, itemsize(one.dtype)) for one in common.wanted]
    boxes = plan_boxes(sizes, common.holders, range(group.size))
    files: list[FileImage] = []
    duties: list[Duty] = []
    for rank in range(group.size):
        own = [(one, boxes[rank][one.name]) for one in common.wanted if one.name in boxes[rank]]
        for file in plan_shards(own, rank).files:
            if rank == group.rank:
                starts = range(0, file.size, tables.BLOCK_BYTES)
                stops = [min(file.size, start + tables.BLOCK_BYTES) for start in starts]
                duties += map(Duty, repeat(len(files)), starts, stops)
            files.append(file)
    return Image(files=tuple(files)), duties


def path_of(store: Store, step: int) -> Path:
    """Where a committed step lies."""
    return store.path / names.step_name(step)
