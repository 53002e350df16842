"""Files as the checkpoint needs them: written past the page cache where the file system can, reserved before, flushed after.

`Files` is every call to the operating system that a save or a load makes, so that tests can let any of them fail. Errors of the disk become
`HomeError`s that name the file and the fix. No torch; used by the block writer, the commits and the reader.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from argosy.errors import CheckpointDamaged, HomeError

ALIGNMENT = 4096
BLOCK_BYTES = 8 << 20
SPARE_BYTES = 16 << 20
"""Left free: a file system that is full to the last block fails in other places."""

_LARGE_PAGE = 2 << 20
_FIXES = {
    errno.ENOSPC: "free some space, let fewer checkpoints stay, or save to another disk",
    errno.EDQUOT: "raise the quota, let fewer checkpoints stay, or save to another disk",
    errno.EROFS: "save to a directory on a disk that is mounted for writing",
    errno.EACCES: "give this user the right to write there, or save elsewhere",
    errno.EPERM: "give this user the right to write there, or save elsewhere",
    errno.EIO: "look at the disk (dmesg), and save to another one",
    errno.ENOENT: "another process has removed it: let one run save into one directory",
}


class Buffer:
    """Page-aligned memory that is reused: first touches are what costs."""

    def __init__(self, num_bytes: int) -> None:
        # Private: a fork must not share the blocks of its parent.
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if num_bytes >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer first touches, and fewer pages to pin for each direct transfer.
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
        self.memory = memoryview(self._map)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)

    def __len__(self) -> int:
        return len(self.memory)


class Blocks:
    """Buffers of one size that are lent out and taken back: saves and loads of a process share them."""

    def __init__(self, num_bytes: int, most: int = 8) -> None:
        self._num_bytes = num_bytes
        self._free: deque[Buffer] = deque(maxlen=most)

    @contextmanager
    def lent(self) -> Iterator[Buffer]:
        """One that nobody else has now."""
        try:
            block = self._free.pop()
        except IndexError:
            block = Buffer(self._num_bytes)
        try:
            yield block
        finally:
            self._free.append(block)


class Files:
    """The operating system's calls; a test's subclass lets them fail."""

    is_disk = True
    """Whether descriptors are the operating system's, so that files can be opened again and many short reads cost about as much as one long one."""

    def open(self, name: str, flags: int, directory: int | None = None, mode: int = 0o644) -> int:
        """A descriptor; symbolic links are not followed."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=directory)

    def write(self, descriptor: int, data: memoryview, offset: int) -> int:
        """`pwrite`."""
        return os.pwrite(descriptor, data, offset)

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """`preadv`."""
        return os.preadv(descriptor, [into], offset)

    def reserve(self, descriptor: int, size: int) -> None:
        """Room for the whole file; a file system that cannot promise it only gets the length."""
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as failure:
            if failure.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(descriptor, size)

    def flush(self, descriptor: int) -> None:
        """`fdatasync`."""
        os.fdatasync(descriptor)

    def flush_directory(self, descriptor: int) -> None:
        """`fsync` of a directory."""
        os.fsync(descriptor)

    def rename(self, old: str, new: str, directory: int) -> None:
        """Within one directory."""
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def link(self, name: str, source: int, directory: int) -> None:
        """The same file in another directory under the same name."""
        os.link(name, name, src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)

    def free_bytes(self, descriptor: int) -> int:
        """What an ordinary user may still take."""
        found = os.fstatvfs(descriptor)
        return found.f_bavail * found.f_frsize


FILES = Files()
BLOCKS = Blocks(BLOCK_BYTES)


def disk_error(failure: OSError, what: str) -> HomeError:
    """An error for people from an error of the disk."""
    fix = _FIXES.get(failure.errno or 0, "look at the disk and the directory")
    return HomeError(f"{what}: {failure.strerror or failure}", fix=fix)


def check_space(files: Files, directory: int, needed: int, what: str) -> None:
    """HomeError when a save cannot fit; asked before anything is written."""
    free = files.free_bytes(directory)
    if free < needed + SPARE_BYTES:
        raise HomeError(
            f"{what} needs {_mebibytes(needed)} and the disk has {_mebibytes(free)} free, of which {_mebibytes(SPARE_BYTES)} are left alone",
            fix=_FIXES[errno.ENOSPC],
        )


def can_write_direct(files: Files, directory: int) -> bool:
    """Found by a real aligned write into the directory: opening says too little."""
    name = f".probe-{secrets.token_hex(4)}"
    block = Buffer(ALIGNMENT)
    try:
        descriptor = files.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, directory)
    except OSError as failure:
        if failure.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            _unlink(name, directory)
            return False
        raise disk_error(failure, "the checkpoint's directory cannot be written to")
    try:
        return os.pwrite(descriptor, block.memory, 0) == ALIGNMENT
    except OSError as failure:
        if failure.errno != errno.EINVAL:
            raise disk_error(failure, "the checkpoint's directory cannot be written to")
        return False
    finally:
        os.close(descriptor)
        _unlink(name, directory)


def write_all(files: Files, descriptor: int, data: memoryview, offset: int) -> None:
    """All of it, however little the system takes at a time."""
    while data:
        done = files.write(descriptor, data, offset)
        if done <= 0:
            raise OSError(errno.EIO, "nothing was written")
        data, offset = data[done:], offset + done


def open_data(files: Files, name: str, directory: int, size: int, what: str) -> tuple[int, bool]:
    """A regular file of this size for reading, and whether it is read past the page cache."""
    is_direct = True
    try:
        try:
            descriptor = files.open(name, os.O_RDONLY | os.O_DIRECT, directory)
        except OSError as failure:
            if failure.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            is_direct = False
            descriptor = files.open(name, os.O_RDONLY, directory)
    except OSError as failure:
        if failure.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR):
            raise CheckpointDamaged(f"{what} lacks its file {name}", fix="use another checkpoint")
        raise disk_error(failure, f"{name} of {what} cannot be opened")
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        os.close(descriptor)
        raise CheckpointDamaged(
            f"{name} of {what} has {found.st_size} bytes, the manifest says {size}",
            fix="use another checkpoint",
        )
    return descriptor, is_direct


def stop_direct(descriptor: int) -> bool:
    """Go on through the page cache: some file systems open for direct reads that they then refuse. False when it did already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def _unlink(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
