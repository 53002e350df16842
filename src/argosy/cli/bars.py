"""A bar of bytes on stderr while something long is under way; nothing where there is no terminal.

Used by `argosy checkpoint` and `argosy data`. Imports rich only when it draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def byte_bar(title: str, total: int = 0) -> Iterator[Callable[[int], None] | None]:
    """A function that is told how many bytes more are done, from any thread."""
    with _drawn(title, total) as bar:
        yield None if bar is None else lambda num_bytes: bar[0].advance(bar[1], num_bytes)


@contextmanager
def growing_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A function that is told how many bytes are done, and of how many as far as is known."""
    with _drawn(title, 0) as bar:
        yield (
            None
            if bar is None
            else lambda done, total: bar[0].update(bar[1], completed=done, total=total)
        )


@contextmanager
def _drawn(title: str, total: int) -> Iterator[tuple[Progress, TaskID] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("argosy: {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress, progress.add_task(title, total=total or None)
