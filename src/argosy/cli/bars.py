"""A bar of bytes on stderr while something long is under way; nothing where there is no terminal.

Used by `argosy checkpoint`. Imports rich only when it draws.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_bar(title: str, total: int = 0) -> Iterator[Callable[[int], None] | None]:
    """A function that is told how many bytes more are done, from any thread."""
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
        task = progress.add_task(title, total=total or None)
        yield lambda num_bytes: progress.advance(task, num_bytes)
