"""The store on disk: its lock, staging directories, the commit, deletion and sweeping.

The order of flushes and renames that makes a save appear whole or not at all is here and nowhere else. No torch; called by the checkpointer and
by the writer process. Never touches a `step-…` directory but to make it appear or, when told, to remove it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

from argosy.checkpoint import checksums, directio, names, tables
from argosy.checkpoint.directio import FILES, Files
from argosy.checkpoint.listings import Listing
from argosy.checkpoint.lives import is_alive
from argosy.checkpoint.manifests import FileRecord
from argosy.checkpoint.names import Kind
from argosy.errors import ConfigError, HomeError

_LOG = logging.getLogger("argosy.checkpoint")


def _nothing() -> None:
    """For who has nothing to look after."""


class Store:
    """A directory of checkpoints, opened for saving."""

    def __init__(self, path: Path, *, files: Files = FILES) -> None:
        self.path = path
        self._files = files
        self._lock: int | None = None
        self._locked_by = 0
        """The process that gives the lock back to all, unless it is lent."""
        self._lent: set[str] = set()
        """Staging directories for which it is; threads add and remove."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as failure:
            raise directio.disk_error(failure, f"the checkpoint directory {path} cannot be used")

    @property
    def is_locked(self) -> bool:
        """Whether this session saves here."""
        return self._lock is not None

    def free_bytes(self) -> int:
        """What the disk has left for an ordinary user."""
        return self._files.free_bytes(self.fd)

    def lend_lock(self, staging: str) -> int | None:
        """For a process that finishes a save of this session: the lock is held until both have let go."""
        self._lent.add(staging)
        return self._lock

    def lock_came_back(self, staging: str) -> None:
        """That process has let go."""
        self._lent.discard(staging)

    def lock(
        self, owner: str = "", *, patience_seconds: float = 0.0, look: Callable[[], None] = _nothing
    ) -> None:
        """Be the one session that saves here; ConfigError names the other. The kernel frees it when the process ends.

        A session that was killed may have left a writer process that finishes its save: that is waited for, and `look` is called meanwhile.
        """
        if self._lock is not None:
            return
        try:
            found = self._files.open(names.LOCK, os.O_RDWR | os.O_CREAT, self.fd)
        except OSError as failure:
            raise directio.disk_error(failure, f"{self.path / names.LOCK} cannot be made")
        if not _locked(found, fcntl.LOCK_EX, patience_seconds, look):
            holder = _describe_holder(os.pread(found, 4096, 0))
            os.close(found)
            fix = "give each run a checkpoint directory of its own, or end the other run"
            if os.environ.get("WORLD_SIZE", "1") != "1":
                fix += "; ranks of one run save together when it is made after init_process_group"
            raise ConfigError(f"{self.path} is being saved into by {holder}", fix=fix)
        said = {"pid": os.getpid(), "host": socket.gethostname(), "run": owner}
        os.ftruncate(found, 0)
        os.pwrite(found, json.dumps(said).encode(), 0)
        self._lock, self._locked_by = found, os.getpid()

    def stage(self, step: int, nonce: str | None = None) -> Staging:
        """A new staging directory; with a nonce, the one that all ranks of a save share: FileNotFoundError when another has taken it away at once."""
        name = names.staging_name(step, nonce or secrets.token_hex(6))
        if self.is_locked:
            self.clear(step)
        self.check_absent(step)
        try:
            os.mkdir(name, 0o755, dir_fd=self.fd)
        except FileExistsError:
            if nonce is None:
                raise
        except OSError as failure:
            raise directio.disk_error(failure, f"{self.path / name} cannot be made")
        return Staging(self, step, name, self._files)

    def check_absent(self, step: int) -> None:
        """ConfigError when there is such a checkpoint already, and it is not known to be damaged."""
        if os.path.exists(f"{self.path}/{names.step_name(step)}") and not self._is_replaceable(
            step
        ):
            raise ConfigError(
                f"{self.path / names.step_name(step)} exists: a checkpoint is never overwritten",
                fix="save another step or into another directory, or remove it first, with rm -r",
            )

    def clear(self, step: int) -> None:
        """Remove a checkpoint that was read and is not whole, so that its step can be saved again; only the holder of the lock may."""
        if self._is_replaceable(step) and (self.path / names.step_name(step)).exists():
            self._prove_damaged(step)
            _LOG.warning("step %d of %s is damaged: a new save takes its place", step, self.path)
            self.remove(step)

    def _prove_damaged(self, step: int) -> None:
        """By reading it once more."""
        is_whole = Listing(self.path, files=self._files).is_whole(step)
        if is_whole is None:
            raise HomeError(
                f"step {step} of {self.path} is noted to be damaged, and cannot be read now",
                fix="look at the disk, or save another step",
            )
        if is_whole:
            (self.path / names.damaged_name(step)).unlink(missing_ok=True)
            self.check_absent(step)

    def _is_replaceable(self, step: int) -> bool:
        """Read and not whole, and nobody wants it kept all the same."""
        is_pinned = (self.path / names.PINS / names.step_name(step)).exists()
        return (self.path / names.damaged_name(step)).exists() and not is_pinned

    def remove(self, step: int) -> None:
        """Delete a checkpoint: first its name, then its files, so that a crash leaves nothing that looks like one."""
        gone = names.removed_name(step, secrets.token_hex(6))
        try:
            self._files.rename(names.step_name(step), gone, self.fd)
            self._files.flush_directory(self.fd)
        except OSError as failure:
            raise directio.disk_error(failure, f"step {step} of {self.path} cannot be removed")
        shutil.rmtree(self.path / gone, ignore_errors=True)
        (self.path / names.damaged_name(step)).unlink(missing_ok=True)

    def sweep(self, keep: str = "") -> list[str]:
        """Remove what earlier sessions left half done; only the holder of the lock may. `keep` is this session's nonce."""
        if self._lock is None:
            raise ConfigError(f"{self.path} is not locked", fix="lock it before sweeping")
        left = []
        for name in os.listdir(self.fd):
            if names.is_draft(name):
                (self.path / name).unlink(missing_ok=True)
            found = names.leftover_of(name)
            if found is None or (keep and found[2].startswith(keep)):
                continue
            left.append(name)
            shutil.rmtree(self.path / name, ignore_errors=True)
        return left

    def close(self) -> None:
        """Give the lock and the directory back."""
        if self._lock is not None:
            if self._locked_by == os.getpid() and not self._lent:
                # A child that a thread is just starting has a copy of the descriptor until it is another program.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


class Staging:
    """A save that is under way: files are put in, then it is committed or abandoned."""

    def __init__(self, store: Store, step: int, name: str, files: Files) -> None:
        self.store = store
        self.step = step
        self.name = name
        self.path = store.path / name
        self.final = names.step_name(step)
        self._files = files
        self.fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=store.fd)

    def write_file(self, name: str, data: bytes, kind: Kind) -> FileRecord:
        """A small file, whole and flushed; its record."""
        self._put(name, data)
        chunk = tables.chunk_bytes_for(len(data))
        array = memoryview(data)
        starts = range(0, len(data), chunk)
        table = [checksums.of_bytes(array[at : at + chunk]) for at in starts]
        packed = tables.pack(checksums.table_of(table))
        return FileRecord(kind=kind, size=len(data), chunk_bytes=chunk, crc32c=packed)

    def commit(self, manifest: bytes, signature: bytes | None = None) -> Path:
        """Make it a checkpoint. When this returns it survives loss of power."""
        try:
            self._files.flush_directory(self.fd)
            if signature is not None:
                self._put(names.SIGNATURE, signature)
            self._put(names.MANIFEST, manifest)
            self._files.flush_directory(self.fd)
            if (self.store.path / self.final).exists():
                # rename() replaces an empty directory without a word.
                raise HomeError(
                    f"{self.store.path / self.final} has appeared meanwhile",
                    fix="let one run save into one directory",
                )
            self._files.rename(self.name, self.final, self.store.fd)
            # A mark can only be of one that was there before.
            (self.store.path / names.damaged_name(self.step)).unlink(missing_ok=True)
            self._files.flush_directory(self.store.fd)
        except OSError as failure:
            raise directio.disk_error(failure, f"step {self.step} cannot be committed")
        self._close()
        return self.store.path / self.final

    def abandon(self) -> None:
        """Leave nothing behind; what another process has made a checkpoint of meanwhile is left whole."""
        self._close()
        gone = self.store.path / names.removed_name(self.step, secrets.token_hex(6))
        try:
            os.rename(self.path, gone)
        except FileNotFoundError:
            return
        except OSError:
            gone = self.path
        shutil.rmtree(gone, ignore_errors=True)

    def leave(self) -> None:
        """Another process commits it: only give the descriptor back."""
        self._close()

    def _put(self, name: str, data: bytes) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            descriptor = self._files.open(name, flags, self.fd)
            try:
                directio.write_all(self._files, descriptor, memoryview(data), 0)
                self._files.flush(descriptor)
            finally:
                os.close(descriptor)
        except OSError as failure:
            raise directio.disk_error(failure, f"{self.path / name} cannot be written")

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def wait_finished(path: Path, seconds: float, look: Callable[[], None] = _nothing) -> bool:
    """Whether nobody finishes a save for a session of this host that is dead, after waiting so long at most: what it staged is newer than all else. `look` is called meanwhile."""
    try:
        found = os.open(path / names.LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return not _is_left_behind(found) or _locked(found, fcntl.LOCK_SH, seconds, look)
    finally:
        os.close(found)


def _locked(descriptor: int, kind: int, patience_seconds: float, look: Callable[[], None]) -> bool:
    """Lock a file, at once unless its owner is dead and only a writer process holds it."""
    deadline = time.monotonic() + patience_seconds
    is_said = False
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline or not _is_left_behind(descriptor):
                return False
        if not is_said:
            _LOG.info("waiting for what a session that has ended left to its writer process")
            is_said = True
        look()
        time.sleep(0.02)


def _describe_holder(said: bytes) -> str:
    """Who has locked a store, by what is written in the lock."""
    try:
        known = json.loads(said)
        run = f" (run {known['run']})" if known["run"] else ""
        return f"process {known['pid']} of host {known['host']}{run}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _is_left_behind(descriptor: int) -> bool:
    """Whether the session that locked the store was of this host and is dead."""
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
        return said["host"] == socket.gethostname() and not is_alive(int(said["pid"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
