"""Which processes save and load together: those of torch.distributed when it is in use, this one alone otherwise.

They find each other through the process group's store, once; after that a save talks over files beside it.
"""

from __future__ import annotations

import itertools

import torch.distributed as dist

from argosy.checkpoint import meetings
from argosy.checkpoint.boards import Group, StoreBoard
from argosy.checkpoint.neighbours import Neighbours, this_host

_count = itertools.count()


def of_process(seconds: float = 600.0) -> Group:
    """The default group of this process; all its ranks make their Checkpointers in the same order."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Group()
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    store = group.get_group_store()
    hall = StoreBoard(store, f"argosy.checkpoint/{next(_count)}")
    session = meetings.meet(hall, rank, size, seconds)
    board = StoreBoard(store, f"argosy.checkpoint/{session}")
    host = this_host()
    neighbours = Neighbours(board, f"{session}/{host}") if host else None
    return Group(rank, size, session, board, seconds=seconds, neighbours=neighbours)
