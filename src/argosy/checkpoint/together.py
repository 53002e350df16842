"""A planned save from its first byte to its end, alone or with others: unchanged files, blocks, votes, the wait for the commit, and giving up so that
everybody hears of it.

Called by whoever has the bytes: the process that saves, or the writer process. The talk goes over files in the staging directory. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from argosy.checkpoint import boards, directio, incremental, names, records, votes
from argosy.checkpoint.absences import Absences
from argosy.checkpoint.blocks import BlockWriter, Pace
from argosy.checkpoint.boards import FileBoard, Group
from argosy.checkpoint.commits import Staging
from argosy.checkpoint.directio import Files
from argosy.checkpoint.records import Outline
from argosy.checkpoint.shares import Duty
from argosy.checkpoint.sources import Source
from argosy.checkpoint.tables import Written
from argosy.checkpoint.votes import Vote
from argosy.errors import ArgosyError, TimedOut

_FAREWELL_SECONDS = 2.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How bytes get to the disk; with `shards` each process writes its own files, for file systems where several cannot write into one."""

    shards: bool = False
    files: Files
    threads: int
    pace: Pace | None = None
    is_incremental: bool = True
    """Whether files that are as the parent has them are linked."""
    begins: Callable[[int], None] | None = None
    """Told how many bytes this process is going to write."""
    confirm: Callable[[], None] | None = None
    """Asked when everything is written and nothing is promised yet: raises when the bytes were not what they should have been."""


def write(
    staging: Staging,
    outline: Outline,
    duties: Sequence[Duty],
    source: Source,
    group: Group,
    settings: Settings,
) -> bytes | None:
    """Write what this process has to, and see the save committed; as `finish`. Whoever calls it gives up when it fails."""
    if settings.is_incremental:
        reduced = incremental.reduce(staging, outline, duties, source, group, files=settings.files)
        outline, duties = reduced.outline, reduced.duties
    needed = sum(duty.stop - duty.start for duty in duties)
    if settings.begins is not None:
        settings.begins(needed)
    if group.is_alone:
        # Of several, the others may have reserved whole files by now, this one's part of them too: they were asked about together, before.
        directio.check_space(settings.files, staging.fd, needed, f"step {staging.step}")
    writer = BlockWriter(
        staging.fd,
        outline.image,
        source,
        threads=settings.threads,
        pace=settings.pace,
        files=settings.files,
    )
    written = writer.write(duties)
    if settings.confirm is not None:
        settings.confirm()
    return finish(staging, outline, written, group)


def note(staging: Path, what: str, rank: int, size: int) -> None:
    """Let the others of the save know who has a rank's part: a writer process that was handed it, or the rank, which writes it itself."""
    if size > 1:
        FileBoard(staging).post(f"{what}-{rank:05d}", b"")


def finish(
    staging: Staging, outline: Outline, written: Sequence[Written], group: Group
) -> bytes | None:
    """Vote and commit, or wait for the commit; the manifest's bytes in the process that commits, None elsewhere."""
    if group.is_alone:
        return records.commit(staging, outline, written)
    board = FileBoard(staging.path)
    vote = votes.encode(Vote(rank=group.rank, written=tuple(written)))
    board.post(f"{votes.VOTE}-{group.rank:05d}", vote)
    if group.rank != 0:
        wait_committed(staging, board, group)
        staging.leave()
        return None
    cast = votes.decode_votes(boards.gather(board, votes.VOTE, group, Absences(board, group).check))
    board.remove(votes.keys_of(group.size))
    return records.commit(staging, outline, votes.all_written(cast))


def wait_committed(staging: Staging, board: FileBoard, group: Group) -> None:
    """Until the step is there; PartnerFailed when the committing rank gives up, TimedOut when it says nothing."""
    final = staging.store.path / staging.final / names.MANIFEST
    deadline = time.monotonic() + group.seconds
    pause = 0.001
    absences = Absences(board, group)
    while not final.exists():
        boards.check_failures(board, group)
        absences.check((0,))
        if not staging.path.exists() and not final.exists():
            raise boards.PartnerFailed(
                f"the save of step {staging.step} was given up by rank 0", fix="see its own error"
            )
        if time.monotonic() > deadline:
            raise TimedOut(
                f"rank 0 has not committed step {staging.step} within {group.seconds:.0f} s",
                fix="see whether it lives",
            )
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)


def give_up(staging: Staging, group: Group, failure: BaseException) -> None:
    """Tell the others; the one that would commit clears up when they know."""
    if group.is_alone:
        staging.abandon()
        return
    board = FileBoard(staging.path)
    try:
        boards.tell_failure(board, group, failure)
        if group.rank == 0:
            boards.wait_all_failed(board, group, failure, _FAREWELL_SECONDS)
    except (OSError, ArgosyError):
        pass  # the directory is gone or the disk is: the others find that out by themselves
    if group.rank == 0:
        staging.abandon()
    else:
        staging.leave()
