"""Sockets under a name in a directory, where processes of one user on one host find each other: the writer of a store, the holders of peers' memory.

One process listens under a name; what a dead one has left there is replaced. Addresses go by the directory's descriptor: they are short, paths are
not. No torch.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")
_MOST_WAITING = 1024
_RETRY_SECONDS = 0.01


def listen(directory: int, name: str) -> socket.socket | None:
    """A socket under a name; None when somebody answers there already."""
    own = f"{name}.{secrets.token_hex(4)}"
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(f"/proc/self/fd/{directory}/{own}")
        os.chmod(own, 0o600, dir_fd=directory)
        found.listen(_MOST_WAITING)
        while True:
            try:
                os.link(own, name, src_dir_fd=directory, dst_dir_fd=directory)
                return found
            except FileExistsError:
                if answers(f"/proc/self/fd/{directory}/{name}"):
                    found.close()
                    return None
                remove(name, directory)
    finally:
        remove(own, directory)


def inherit(listener: socket.socket) -> None:
    """A fork goes on with what its parent listens to: whoever connects sees its number from here on."""
    listener.listen(_MOST_WAITING)


def connect(link: socket.socket, directory: Path, name: str) -> None:
    """To whoever listens there; OSError when nobody does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        link.connect(f"/proc/self/fd/{descriptor}/{name}")
    finally:
        os.close(descriptor)


def connect_within(link: socket.socket, directory: Path, name: str, seconds: float) -> None:
    """As `connect`, to one that may hang; TimeoutError when it has not taken notice by then. What is said on the link has as much time, each."""
    deadline = time.monotonic() + seconds
    link.settimeout(seconds)
    while True:
        try:
            connect(link, directory, name)
            return
        except BlockingIOError:
            # Too many wait already to be accepted.
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{directory / name} accepts nobody")
        time.sleep(_RETRY_SECONDS)


def answers_in(directory: Path, name: str) -> bool:
    """Whether somebody listens under a name there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.setblocking(False)
        try:
            connect(link, directory, name)
        except BlockingIOError:
            return True  # and accepts nobody: others wait already
        except OSError:
            return False
    return True


def answers(path: str) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.setblocking(False)
        try:
            link.connect(path)
        except (ConnectionError, FileNotFoundError):
            return False
        except BlockingIOError:
            pass  # and accepts nobody: others wait already
    return True


def remove(name: str, directory: int) -> None:
    """A name that may have gone already."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass


def inode_of(name: str, directory: int) -> int:
    """By which one's own socket is known; 0 when there is none."""
    try:
        return os.stat(name, dir_fd=directory).st_ino
    except FileNotFoundError:
        return 0


def is_own_user(link: socket.socket) -> bool:
    """Whether the other side is of this user."""
    return _peer(link)[1] == os.getuid()


def pid_of(link: socket.socket) -> int:
    """The process on the other side; 0 when there is none."""
    return _peer(link)[0]


def _peer(link: socket.socket) -> tuple[int, int]:
    found = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user
