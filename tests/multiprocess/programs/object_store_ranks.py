"""A rank that saves with another, loads its part back from an object store and meets one that cannot be listed: `python object_store_ranks.py RANK SIZE DIRECTORY`; prints a JSON line.

A program and no fork: a child of a process that has used the client of object stores has its locks and none of its threads.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401

from argosy.checkpoint import Checkpointer, Objects, groups
from argosy.errors import ArgosyError, TimedOut

rank, size, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
store = dist.FileStore(str(directory / "store"), size)
dist.init_process_group("fake", store=store, rank=rank, world_size=size)


def group():
    return groups.of_process(seconds=60)


def does_not_answer(prefix=""):
    raise TimedOut("nowhere cannot be listed", fix="wait")


mesh = DeviceMesh("cpu", torch.arange(size), _init_backend=False)
whole = torch.arange(300 * 64.0).reshape(300, 64)
piece = whole.chunk(size, dim=1)[rank].clone(memory_format=torch.contiguous_format)
base = DTensor.from_local(
    piece, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=whole.stride()
)
objects = Objects(f"file://{directory}/far")
with Checkpointer(directory / "disk", group=group(), objects=objects) as checkpointer:
    checkpointer.save(1, {"base": base}, streams=False)
piece.zero_()
second = group()
second.agree(b"uploaded")
loaded = Checkpointer(directory / "new", group=second, objects=objects).load(
    {"base": base}, streams=False
)
is_right = torch.equal(piece, whole.chunk(size, dim=1)[rank])
nowhere = Objects(f"file://{directory}/nowhere")
alone = Checkpointer(directory / "none", group=group(), objects=nowhere)
if rank == 0:
    alone._chain.remote.bucket.list = does_not_answer
failure = ["nothing", ""]
try:
    alone.load({"base": base}, streams=False)
except ArgosyError as caught:
    failure = [type(caught).__name__, caught.what]
print(json.dumps([loaded.where == objects.url, is_right, *failure]), flush=True)
