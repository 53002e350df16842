"""Shared words without native code: the futex by ctypes, and a lock of the kernel where an atomic instruction would be needed.

Only waits.py calls this. The system call is the fence: on CPUs that reorder stores it is made between data and word. Python cannot
compare and swap, so that takes the lock of the memory's own file, which the kernel frees when its holder dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import threading
import time
from typing import Protocol

from argosy.errors import ConfigError, TimedOut
from argosy.native import loader

_SLICE_SECONDS = 0.05
_FIRST_SLICE_SECONDS = 0.005
_LOCK_SECONDS = 10.0
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _NUMBERS.get(platform.machine())
_IS_ORDERED = platform.machine() == "x86_64"

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
)
_fence_word = ctypes.c_uint32(0)
_swapping = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class Watched(Protocol):
    """What a wait needs of `waits.Peers`."""

    pidfds: tuple[int, ...]
    broken: int | None


def wait(
    word: int, wanted: int, spin_seconds: float, peers: Watched, deadline: float
) -> tuple[int, int]:
    """As `ag_wait`: the status, and the position of the peer it is about or -1."""
    if _spin(word, wanted, spin_seconds):
        return loader.OK, -1
    slice_seconds = _FIRST_SLICE_SECONDS
    while True:
        seen = peek(word)
        if _reached(seen, wanted):
            return loader.OK, -1
        left = deadline - time.monotonic()
        if left > 0 and not _is_broken(peers):
            _sleep_on(word, seen, min(left, slice_seconds))
        if _reached(peek(word), wanted):
            return loader.OK, -1
        status, lost = _reason_to_give_up(peers, deadline)
        if status != loader.OK:
            # A peer may have posted and then ended: the word has the last say.
            return (loader.OK, -1) if _reached(peek(word), wanted) else (status, lost)
        slice_seconds = _SLICE_SECONDS


def post(word: int, value: int) -> None:
    """As `ag_post`."""
    _fence()
    ctypes.c_uint32.from_address(word).value = value
    wake(word)


def wake(word: int) -> None:
    """As `ag_wake`."""
    _futex(word, _WAKE, _EVERYBODY, None)


def fence() -> None:
    """A full one, which the system call has in it; stores before loads too."""
    _futex(ctypes.addressof(_fence_word), _WAKE, 1, None)


def peek(word: int) -> int:
    """As `ag_peek`."""
    value = int(ctypes.c_uint32.from_address(word).value)
    _fence()
    return value


def load(word: int) -> int:
    """As `ag_load`."""
    value = int(ctypes.c_uint64.from_address(word).value)
    _fence()
    return value


def store(word: int, value: int) -> None:
    """As `ag_store`."""
    _fence()
    ctypes.c_uint64.from_address(word).value = value


def compare_and_swap(word: int, expected: int, desired: int, descriptor: int) -> bool:
    """Under the lock of the file that holds the word; bounded, since a stopped process may hold it."""
    if descriptor < 0:
        raise ConfigError(
            "compare-and-swap without native code needs the descriptor of the shared memory",
            fix="pass descriptor=arena.fileno(), or build the native kernels (`argosy doctor`)",
        )
    with _swapping:
        # A descriptor that was handed over shares its locks with the sender: only one opened here excludes the others.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(own)
            try:
                if load(word) != expected:
                    return False
                store(word, desired)
                return True
            finally:
                # Explicitly: a child forked by another thread in this moment has a copy that would go on holding it.
                fcntl.flock(own, fcntl.LOCK_UN)
        finally:
            os.close(own)


def _forget_lock() -> None:
    # A child forked while another thread was swapping would find the lock taken for ever.
    global _swapping
    _swapping = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def _lock(descriptor: int) -> None:
    deadline, pause = time.monotonic() + _LOCK_SECONDS, 0.00005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimedOut(
                    f"another process has held the lock of a shared word for {_LOCK_SECONDS:g} s",
                    fix="a stopped process may hold it: continue or kill it",
                )
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _reached(value: int, wanted: int) -> bool:
    return (value - wanted) & 0xFFFF_FFFF < 0x8000_0000


def _spin(word: int, wanted: int, spin_seconds: float) -> bool:
    end = time.monotonic() + spin_seconds
    while not _reached(peek(word), wanted):
        if time.monotonic() >= end:
            return False
        os.sched_yield()
    return True


def _is_broken(peers: Watched) -> bool:
    return peers.broken is not None and peek(peers.broken) != 0


def _reason_to_give_up(peers: Watched, deadline: float) -> tuple[int, int]:
    if _is_broken(peers):
        return loader.BROKEN, -1
    watch = select.poll()
    positions = {fd: index for index, fd in enumerate(peers.pidfds) if fd >= 0}
    for fd in positions:
        watch.register(fd, select.POLLIN)
    ended = [(positions[fd], event) for fd, event in watch.poll(0)] if positions else []
    if ended:
        lost, event = min(ended)
        return (loader.BAD if event & select.POLLNVAL else loader.PEER_LOST), lost
    return (loader.TIMEOUT if time.monotonic() >= deadline else loader.OK), -1


def _sleep_on(word: int, seen: int, seconds: float) -> None:
    whole = int(seconds)
    timeout = _Timespec(whole, int((seconds - whole) * 1e9))
    # A signal, a changed word and the end of the slice are all the same to the caller, who looks again.
    _futex(word, _WAIT, seen, ctypes.byref(timeout))


def _fence() -> None:
    if not _IS_ORDERED:
        fence()


def _futex(word: int, operation: int, value: int, timeout: object) -> None:
    if _NUMBER is None:
        raise ConfigError(
            f"waiting on shared memory is not known for {platform.machine()} without native code",
            fix="install a C compiler and reinstall argosy",
        )
    if _syscall(_NUMBER, word, operation, value, timeout, None, 0) >= 0:
        return
    failure = ctypes.get_errno()
    if failure not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(failure, f"futex: {os.strerror(failure)}")
