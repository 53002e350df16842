"""Expiry: what Argosy wrote for runs that ended long ago is deleted, so that a home does not grow for ever.

The controller looks soon after its start and whenever runs were forgotten, in a thread. Deleted is only what Argosy itself wrote: files
of a program (saves, metrics, anything) stay, and so does everything beside a file `keep`. A run that is known is never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator

from argosy.control.home import Cluster, is_key
from argosy.control.identity import counter_of
from argosy.telemetry.rundir import (
    end_path,
    errors_directory,
    exec_directory,
    logs_directory,
    spec_path,
    stacks_directory,
)

logger = logging.getLogger("argosy.controller")
DEFAULT_KEEP_DAYS = 30.0
KEEP_MARK = "keep"
_DAY_SECONDS = 86_400.0
_FIRST_LOOK_SECONDS = 60.0
_OUTPUT = (logs_directory, errors_directory, exec_directory, stacks_directory)
# How it ended goes last: it says how old the rest is, should this be interrupted.
_RECORDS = (spec_path, end_path)


class Expiry:
    """Deletes for one controller, one look at a time."""

    def __init__(
        self, cluster: Cluster, is_known: Callable[[str], bool], now: Callable[[], float]
    ) -> None:
        """`is_known` is asked from a thread; `now` gives wall-clock seconds that do not jump when somebody sets the clock."""
        self._cluster = cluster
        self._is_known = is_known
        self._now = now
        self._keep_days = keep_days()
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Look soon: whoever has just started the cluster waits for other things."""
        if self._keep_days > 0:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_FIRST_LOOK_SECONDS, self.look)

    def look(self) -> None:
        """Delete what is due, unless that is being done."""
        if self._keep_days > 0 and (self._looking is None or self._looking.done()):
            loop = asyncio.get_running_loop()
            self._looking = loop.run_in_executor(None, self._look)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        before = self._now() - self._keep_days * _DAY_SECONDS
        count = expire_runs(self._cluster.runs, before, self._is_known)
        count += expire_clusters(self._cluster, min(before, boot_time()))
        if count:
            logger.info("deleted what %d runs wrote that ended long ago", count)


def keep_days() -> float:
    """From ARGOSY_KEEP_DAYS; 0: for ever."""
    text = os.environ.get("ARGOSY_KEEP_DAYS", "")
    try:
        return max(0.0, float(text)) if text else DEFAULT_KEEP_DAYS
    except ValueError:
        logger.warning("ARGOSY_KEEP_DAYS=%r is not a number", text)
        return 0.0  # rather keep too much


def expire_runs(runs: str, before: float, is_known: Callable[[str], bool]) -> int:
    """Delete what Argosy wrote for runs that ended before this time and are not known any more; how many it were."""
    count = 0
    for name, path in _directories(runs):
        if counter_of(name) is None or is_known(name) or _ended_at(path) > before:
            continue
        if not os.path.lexists(os.path.join(path, KEEP_MARK)):
            count += _delete(path)
    return count


def expire_clusters(own: Cluster, before: float) -> int:
    """The same for clusters of this home that ended with an earlier boot; one without a run left goes as a whole."""
    count = 0
    for name, path in _directories(os.path.dirname(own.directory)):
        other = Cluster(path, "")
        if name == own.key or not is_key(name) or os.path.lexists(os.path.join(path, KEEP_MARK)):
            continue
        # A log that nobody has written since the machine was started has no controller.
        if max(map(_changed_at, (path, other.events, f"{other.events}-wal"))) > before:
            continue
        count += expire_runs(other.runs, before, lambda run: False)
        if _is_empty(other.runs):
            shutil.rmtree(path, ignore_errors=True)
    return count


def boot_time() -> float:
    """When this machine was started."""
    with open("/proc/stat") as file:
        return next((float(line.split()[1]) for line in file if line.startswith("btime ")), 0.0)


def _directories(parent: str) -> Iterator[tuple[str, str]]:
    """(name, path) of the real directories in it."""
    try:
        entries = sorted(os.scandir(parent), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield entry.name, entry.path


def _is_empty(runs: str) -> bool:
    """Nothing is there; what cannot be looked at, such as a link to a disk that is away, is not empty."""
    try:
        return not os.listdir(runs)
    except FileNotFoundError:
        return not os.path.lexists(runs)
    except OSError:
        return False


def _ended_at(path: str) -> float:
    """As its end says; one that has none, because everything ended with it, lived as long as it wrote something."""
    if ended_at := _changed_at(end_path(path)):
        return ended_at
    output = [spec_path(path), *(folder(path) for folder in _OUTPUT)]
    output += [os.path.join(folder, name) for folder in output[1:] for name in _names(folder)]
    return max(map(_changed_at, output)) or _changed_at(path)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _changed_at(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _delete(path: str) -> bool:
    """Delete Argosy's part of a run's directory, and the directory if nothing else is in it; whether there was any."""
    found = [folder(path) for folder in _OUTPUT if os.path.lexists(folder(path))]
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    records = [record(path) for record in _RECORDS]
    with contextlib.suppress(OSError):
        if not {os.path.join(path, name) for name in os.listdir(path)} <= set(records):
            return bool(found)
        for record in records:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(record)
        os.rmdir(path)
        return True
    return bool(found)
