"""One job of the writer process: blocks from its memory to the disk, then the vote, the commit or the wait for it.

Whatever goes wrong is told to the other processes of the save and leaves nothing behind. Called by serving.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from argosy.checkpoint import directio, manifests, together, votes
from argosy.checkpoint.boards import Group
from argosy.checkpoint.commits import Staging, Store
from argosy.checkpoint.directio import FILES
from argosy.checkpoint.together import Settings
from argosy.checkpoint.writer.memories import JobMemory
from argosy.checkpoint.writer.messages import Job
from argosy.checkpoint.writer.pacing import Pace
from argosy.errors import ArgosyError


def accept(job: Job) -> None:
    """Let the others of the save know that it will be finished, whatever happens to its rank."""
    try:
        together.note(Path(job.store) / job.staging, votes.HANDED, job.rank, job.size)
    except ArgosyError:
        pass  # the job itself meets it, and tells


def carry_out(job: Job, memory: JobMemory, pace: Pace, has_left: Callable[[], bool]) -> int | None:
    """Write it and see it committed; the manifest's CRC from the one that commits. `has_left` says whether its rank has gone."""
    image, step = job.outline.image, job.outline.facts.step
    store = Store(Path(job.store))
    try:
        try:
            staging = Staging(store, step, job.staging, FILES)
        except OSError as failure:
            raise directio.disk_error(failure, f"the staging directory of step {step} has gone")
        seconds = min(job.seconds, job.deadline_seconds)
        group = Group(job.rank, job.size, job.session, seconds=seconds, has_left=has_left)
        try:
            memory.check()
            source = memory.source(image, job.duties)
            settings = Settings(
                files=FILES,
                threads=job.threads,
                pace=pace,
                is_incremental=job.is_incremental,
                confirm=memory.check,
            )
            data = together.write(staging, job.outline, job.duties, source, group, settings)
        except BaseException as failure:
            together.give_up(staging, group, failure)
            raise
    finally:
        store.close()
    return None if data is None else manifests.crc_of(data)
