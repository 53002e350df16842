"""What the keeper asks of Linux beyond the `os` module: prctl, memfds with seals, pidfds, raised limits.

Called by every other module of the keeper; knows nothing of attempts or frames.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.prctl.restype = ctypes.c_int


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Orphans of this process's descendants become its own children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_death_signal(number: int) -> None:
    """This process gets the signal when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def set_name(name: str) -> None:
    """The name shown by ps (15 bytes)."""
    text = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(text))


def sealed_memfd(name: str, data: bytes) -> int:
    """A memfd with this content that nobody can change any more."""
    fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(fd)
        raise
    return fd


def arena_memfd(name: str, size: int) -> int:
    """A memfd of fixed size: no user of a shared mapping can shrink it under the others."""
    fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # No F_SEAL_SEAL: whoever publishes an arena seals it against further writers.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_memfd(fd: int) -> bytes:
    """The whole content, without moving a shared offset."""
    size = os.fstat(fd).st_size
    parts = []
    offset = 0
    while offset < size:
        part = os.pread(fd, size - offset, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def reopen(fd: int, flags: int = os.O_RDONLY) -> int:
    """A new open description of the same file: its own offset."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def send_signal(pidfd: int, number: int) -> bool:
    """Send through the pidfd; False when the process is gone already."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


def raise_open_files() -> tuple[int, int]:
    """Lift the soft limit of open files to the hard one; returns the limits from before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    except (OSError, ValueError):
        pass
    return before


def set_priority(nice: int) -> bool:
    """Set this process's nice level where allowed."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError:
        return False
    return True


def set_oom_score(value: int) -> bool:
    """Set how readily the kernel kills this process when memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(value))
    except OSError:
        return False
    return True
