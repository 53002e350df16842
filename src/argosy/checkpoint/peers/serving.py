"""The holder process: clients come over a socket, put, get and list; what they have put outlives them.

One thread attends each client. Whoever dies in the middle of a put leaves nothing behind. The process ends when it is told to, or when nobody has
been there for a long time. `python -m argosy.checkpoint.peers` runs it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from argosy.checkpoint import checksums, sockets
from argosy.checkpoint.peers import messages
from argosy.checkpoint.peers.messages import (
    BLOCK_BYTES,
    Block,
    Done,
    End,
    Forget,
    Get,
    Labels,
    List,
    Put,
    Ready,
    Said,
)
from argosy.checkpoint.peers.shelves import Incoming, Shelves
from argosy.errors import ArgosyError, ProtocolError

_LOOK_SECONDS = 1.0
_BLOCK_SECONDS = 600.0
"""After which a client that is silent in the middle of a put has lost its room."""


class Serving:
    """Everything the process does."""

    def __init__(
        self, listener: socket.socket, directory: int, name: str, shelves: Shelves
    ) -> None:
        self._listener = listener
        self._directory = directory
        self._name = name
        self._own = sockets.inode_of(name, directory)
        self._shelves = shelves
        self._clients: dict[threading.Thread, socket.socket] = {}
        self._is_ending = False

    def serve(self, linger_seconds: float) -> None:
        """Until it is told to end, or nobody has been there for so long."""
        self._listener.settimeout(_LOOK_SECONDS)
        lonely_since = time.monotonic()
        while not self._is_ending and time.monotonic() - lonely_since < linger_seconds:
            self._clients = {one: link for one, link in self._clients.items() if one.is_alive()}
            if self._clients:
                lonely_since = time.monotonic()
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                time.sleep(_LOOK_SECONDS)  # too many open files, or no memory: clients go again
                continue
            link.settimeout(None)
            thread = threading.Thread(target=self._attend, args=(link,), daemon=True)
            self._clients[thread] = link
            thread.start()
        self._leave()

    def _leave(self) -> None:
        """Nobody finds it from here on, and whoever is connected sees the end."""
        if sockets.inode_of(self._name, self._directory) == self._own:
            sockets.remove(self._name, self._directory)
        self._listener.close()
        for thread, link in self._clients.items():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _attend(self, link: socket.socket) -> None:
        with link:
            if not sockets.is_own_user(link):
                return
            try:
                while (said := messages.receive_said(link)) is not None:
                    if run := _run_of(said):
                        self._shelves.note_user(id(link), run)
                    self._hear(link, said)
            except (OSError, ProtocolError):
                pass  # the client has gone, or makes no sense: it sees the connection end
            finally:
                self._shelves.note_gone(id(link))

    def _hear(self, link: socket.socket, said: Said) -> None:
        """Carry one order out; what is wrong with it is an answer."""
        try:
            if isinstance(said, Put):
                self._take(link, said)
            elif isinstance(said, Get):
                self._give(link, said)
            elif isinstance(said, List):
                messages.send(link, Labels(labels=self._shelves.labels(said.run)))
            elif isinstance(said, Forget):
                self._shelves.forget_newer(said.label)
                messages.send(link, Done())
            elif isinstance(said, End):
                self._is_ending = True
                messages.send(link, Done())
                # Who waits for the next client does not see the flag before one comes.
                sockets.answers(f"/proc/self/fd/{self._directory}/{self._name}")
            else:
                raise ProtocolError(f"{type(said).__name__} was not expected")
        except ProtocolError:
            raise
        except ArgosyError as failure:
            messages.send(link, messages.refusal_of(failure))

    def _take(self, link: socket.socket, said: Put) -> None:
        incoming = self._shelves.begin(said.label, said.keep)
        if incoming is not None:
            link.settimeout(_BLOCK_SECONDS)
            try:
                self._fill(link, incoming)
                self._shelves.finish(incoming)
            finally:
                link.settimeout(None)
                self._shelves.give_up(incoming)
        messages.send(link, Done())

    def _fill(self, link: socket.socket, incoming: Incoming) -> None:
        while incoming.num_bytes < incoming.label.num_bytes:
            messages.send(link, Ready())
            block = messages.receive_said(link)
            if not isinstance(block, Block) or block.num_bytes > BLOCK_BYTES:
                raise ProtocolError(f"{type(block).__name__} instead of a block")
            messages.receive_into(link, incoming.room(block.num_bytes))
            incoming.took(block.num_bytes, block.crc32c)

    def _give(self, link: socket.socket, said: Get) -> None:
        memory = self._shelves.memory_of(said.address)
        if not (
            0 <= said.start < said.stop <= len(memory) and said.stop - said.start <= BLOCK_BYTES
        ):
            raise ProtocolError(f"bytes {said.start} to {said.stop} of {len(memory)}")
        data = memory.checked(said.start, said.stop)
        crc32c = checksums.of_bytes(data)
        messages.send(link, Block(num_bytes=len(data), crc32c=crc32c), data)


def _run_of(said: Said) -> str:
    """Whose checkpoints it is about; nothing when that is not said."""
    if isinstance(said, Put | Forget):
        return said.label.run
    if isinstance(said, Get):
        return said.address.run
    return said.run if isinstance(said, List) else ""
