"""torch_checkpointing as a side of the benchmark `checkpoint`: `python checkpoint_peer.py MEBIBYTES DIRECTORY` in its own environment, BENCH_SOCKET in the environment.

As its documents have it: `save` stages in a thread and writes in a process of its own, `lock` is held around the optimizer's step. Not its default: direct I/O is off, which it
does not align its writes for. It never flushes what it has written; that is done here after a turn, uncounted, so that the other side does not pay for it.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import Future
from itertools import count
from pathlib import Path

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkpoint_task import Saving, Task, take_turns


def main() -> None:
    mebibytes, directory = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    task = Task(mebibytes)
    # Pinned memory and copies that do not block need a GPU.
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    manager = CheckpointManager(
        CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )
    task.lock = manager.lock
    numbers = count()
    path = directory

    def save() -> Saving:
        nonlocal path
        path = directory / f"step_{next(numbers)}"
        before = task.waited_seconds
        written = manager.save(str(path), {"state": task.tensors()})
        assert isinstance(written, Future)

        def finish() -> float:
            written.result()
            flush(path)
            for other in directory.glob("step_*"):
                if other != path:
                    shutil.rmtree(other)
            return task.waited_seconds - before

        return Saving(written.done, finish)

    take_turns(task, save, lambda: manager.load(str(path), into={"state": task.tensors()}))
    manager.close()


def flush(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


if __name__ == "__main__":
    main()
