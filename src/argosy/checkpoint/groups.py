"""Which processes save and load together: those of torch.distributed when it is in use, this one alone otherwise.

They find each other through the process group's store, once; after that a save talks over files beside it.
"""

from __future__ import annotations

import itertools
from functools import partial

import torch.distributed as dist

from argosy.checkpoint import absences, meetings
from argosy.checkpoint.boards import Group, Met, StoreBoard
from argosy.checkpoint.neighbours import Neighbours, this_host
from argosy.errors import ConfigError

_count = itertools.count()


def of_process(seconds: float = 600.0) -> Group:
    """The default group of this process; all its ranks make their Checkpointers in the same order, and meet when they first save or load."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Group()
    rank, size = dist.get_rank(), dist.get_world_size()
    return Group(rank, size, seconds=seconds, meet=partial(_meet, next(_count), seconds))


def _meet(number: int, seconds: float) -> Met:
    group = dist.group.WORLD
    if group is None:
        raise ConfigError(
            "the process group with which the Checkpointer was made is gone",
            fix="close it before dist.destroy_process_group(), or make one after that",
        )
    store = group.get_group_store()
    hall = StoreBoard(store, f"argosy.checkpoint/{number}")
    session = meetings.meet(hall, group.rank(), group.size(), seconds)
    board = StoreBoard(store, f"argosy.checkpoint/{session}")
    absences.announce(board, group.rank())
    host = this_host()
    return Met(session, board, Neighbours(board, f"{session}/{host}") if host else None)
