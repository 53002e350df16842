"""Pseudo-terminals: the keeper holds the master and always drains it into the process's log.

Attached clients get the same bytes live and may type and resize. A client that does not read is dropped, a full disk
loses log bytes with a note; neither ever blocks the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Callable
from typing import Any

from argosy.control.keeper.frames import Connection
from argosy.control.keeper.loop import READ, WRITE, Loop

_READ_BYTES = 64 << 10
_MOST_TYPED_BYTES = 1 << 20


class Terminal:
    """One pty, its log and its attached clients."""

    def __init__(
        self,
        loop: Loop,
        log_fd: int,
        warn: Callable[[str], None],
        pair: tuple[int, int] | None = None,
    ) -> None:
        self.loop = loop
        self.log_fd = log_fd
        self.warn = warn
        self.master, self.slave = pair or os.openpty()
        self.clients: list[Connection] = []
        self._typed = bytearray()
        self._has_warned = False
        os.set_blocking(self.master, False)
        # The slave stays open here as well: without it the master would report a hang-up, again and
        # again, whenever the process closes its own side for a while.
        loop.watch(self.master, READ, self._ready)

    def attach(self, client: Connection) -> None:
        """From now on this client sees what is printed and may type."""
        self.clients.append(client)
        client.on_bytes = self.type

    def detach(self, client: Connection) -> None:
        """The client is gone; again is fine."""
        if client in self.clients:
            self.clients.remove(client)

    def type(self, data: bytes) -> None:
        """Give bytes to the process as if typed; too many unread ones are dropped with the bell's silence."""
        if self.master < 0 or len(self._typed) + len(data) > _MOST_TYPED_BYTES:
            return
        self._typed += data
        self._write_typed()

    def resize(self, rows: int, columns: int) -> None:
        """Set the window size; the kernel tells the foreground process."""
        if self.master >= 0:
            size = struct.pack("HHHH", rows & 0xFFFF, columns & 0xFFFF, 0, 0)
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def finish(self) -> None:
        """The process tree is gone: take what it printed last, then close everything."""
        if self.master < 0:
            return
        while self._drain_once():
            pass
        self.loop.forget(self.master)
        for fd in (self.master, self.slave, self.log_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.master = self.slave = self.log_fd = -1
        clients, self.clients = self.clients, []
        for client in clients:
            client.close_when_written()

    def to_state(self) -> dict[str, Any]:
        """For a successor program: descriptors by number."""
        return {"master": self.master, "slave": self.slave, "log": self.log_fd}

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._write_typed()
        if mask & ~WRITE and self.master >= 0:
            self._drain_once()

    def _drain_once(self) -> bool:
        try:
            data = os.read(self.master, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            return False
        if not data:
            return False
        self._log(data)
        for client in list(self.clients):
            client.send_bytes(data)
        return True

    def _log(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.log_fd, view) :]
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                self.warn(f"output of the terminal is lost: {error.strerror}")

    def _write_typed(self) -> None:
        try:
            while self._typed:
                count = os.write(self.master, self._typed[:4096])
                del self._typed[:count]
        except BlockingIOError:
            pass
        except OSError:
            self._typed.clear()
        mask = READ | WRITE if self._typed else READ
        self.loop.watch(self.master, mask, self._ready)
