"""Descriptors handed from process to process over abstract unix sockets, and what the kernel says of the peer.

Message-preserving sockets, one small text and at most one descriptor each; never blocks, never trusts what the peer says of itself.
Used by locality.py; knows nothing of ranks or arenas. Never imports torch.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterable

NONCE_BYTES = 32
_MOST_TEXT = 4096
_SO_PEERPIDFD = 77
_SLICE_MILLISECONDS = 50
_CREDENTIALS = struct.Struct("3i")


def listen(backlog: int) -> tuple[socket.socket, str]:
    """A listening socket under a random name that nobody can guess; the name vanishes with the socket."""
    name = f"argosy-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener, name


def connect(name: str) -> socket.socket:
    """A connection to a listening process of this network namespace; OSError when there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection, if one waits."""
    try:
        connection, _ = listener.accept()
    except BlockingIOError:
        return None
    connection.setblocking(False)
    return connection


def send(connection: socket.socket, text: bytes, descriptor: int | None = None) -> None:
    """One message; OSError when the peer is gone."""
    rights = [] if descriptor is None else [descriptor]
    socket.send_fds(connection, [text], rights, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[bytes, int | None] | None:
    """One message and its descriptor, None when nothing is there yet; ConnectionError at the end."""
    room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
    try:
        text, ancillary, _, _ = connection.recvmsg(_MOST_TEXT, room, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    numbers = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) // numbers.itemsize * numbers.itemsize])
    for extra in numbers[1:]:
        os.close(extra)
    if not text and not numbers:
        raise ConnectionResetError("the peer has closed its connection")
    return text, numbers[0] if numbers else None


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(uid, pid) of the process at the other end, as the kernel saw it; pid 0 when it is in another pid namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid, pid


def watch_peer(connection: socket.socket) -> int:
    """A pidfd of the process at the other end of an open connection; -1 where it cannot be had."""
    with contextlib.suppress(OSError):
        descriptor = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        return descriptor
    _, pid = peer_of(connection)
    with contextlib.suppress(OSError):
        if pid > 0:
            # Older kernels: while the connection is open the peer lives, so its number cannot be another's.
            descriptor = os.pidfd_open(pid)
            if not _has_hung_up(connection):
                return descriptor
            os.close(descriptor)
    return -1


def has_ended(pidfd: int) -> bool:
    """Whether a watched process is gone."""
    return pidfd >= 0 and bool(_poll(pidfd, select.POLLIN))


def nonce_memfd(nonce: bytes) -> int:
    """A sealed memfd with a nonce: the proof that is handed over."""
    descriptor = os.memfd_create("argosy-nonce", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, nonce)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def read_nonce(descriptor: int) -> bytes:
    """What a handed-over memfd holds; empty when it is no memfd."""
    try:
        # Only memory has seals: reading it cannot wait for anybody.
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        return os.pread(descriptor, NONCE_BYTES, 0)
    except OSError:
        return b""


def wait_readable(sockets: list[socket.socket], deadline: float) -> bool:
    """Wait for a slice of time, so that the caller looks at the peers; False when the time is over."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        return False
    poller = select.poll()
    for each in sockets:
        poller.register(each, select.POLLIN)
    poller.poll(min(_SLICE_MILLISECONDS, int(remaining * 1000) + 1))
    return True


def close_all(descriptors: Iterable[int]) -> None:
    """Those that are real."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _has_hung_up(connection: socket.socket) -> bool:
    return bool(_poll(connection.fileno(), 0) & (select.POLLHUP | select.POLLERR))


def _poll(descriptor: int, events: int) -> int:
    poller = select.poll()
    poller.register(descriptor, events)
    found = poller.poll(0)
    return found[0][1] if found else 0
