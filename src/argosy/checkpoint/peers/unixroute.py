"""The route on one machine: a holder process per (pretended) host, reached by a socket in a directory of this user.

Connections are made when they are needed and used again; one that breaks is not. Everything is checked on receipt. Several threads may talk at once.
Called by the checkpointer, by the process that copies and by loads.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from argosy.checkpoint import checksums, names, processes, sockets
from argosy.checkpoint.directio import BLOCKS, disk_error
from argosy.checkpoint.peers import messages
from argosy.checkpoint.peers.labels import Address, Label
from argosy.checkpoint.peers.messages import (
    BLOCK_BYTES,
    Answer,
    Block,
    End,
    Forget,
    Get,
    Labels,
    Put,
    Ready,
    Refused,
    Said,
)
from argosy.checkpoint.peers.routes import Fill
from argosy.checkpoint.peers.settings import Peers
from argosy.errors import CheckpointDamaged, ClusterError, PeerAbsent, ProtocolError, TimedOut

_START_SECONDS = 60.0
_READ_SECONDS = 10.0
"""For an answer that takes no new memory: whoever loads has other places to turn to."""


class UnixRoute:
    """Holders of this machine."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.directory = Path(peers.directory) if peers.directory else _default_directory()
        self._lock = threading.Lock()
        self._idle: dict[str, list[socket.socket]] = {}

    def start(self, host: str) -> None:
        """Unless one answers."""
        try:
            self.list(host, "")
        except PeerAbsent:
            self._launch(host)
            self.list(host, "")

    def put(self, host: str, label: Label, fill: Fill) -> int:
        """Block by block."""
        with self._talking(host) as link:
            answer = self._answer(host, link, Put(label=label, keep=self._peers.keep))
            sent = 0
            with BLOCKS.lent() as block:
                while isinstance(answer, Ready):
                    data = block.memory[: min(BLOCK_BYTES, label.num_bytes - sent)]
                    fill(sent, data)
                    said = Block(num_bytes=len(data), crc32c=checksums.of_bytes(data))
                    answer = self._answer(host, link, said, data)
                    sent += len(data)
            return sent

    def get(self, host: str, address: Address, start: int, into: memoryview) -> None:
        """In blocks, each checked."""
        with self._talking(host, _READ_SECONDS) as link:
            for at in range(0, len(into), BLOCK_BYTES):
                piece = into[at : at + BLOCK_BYTES]
                first = start + at
                said = Get(address=address, start=first, stop=first + len(piece))
                answer = self._answer(host, link, said)
                if not isinstance(answer, Block) or answer.num_bytes != len(piece):
                    raise ProtocolError(f"the holder of {host} answered {answer}")
                messages.receive_into(link, piece)
                if checksums.of_bytes(piece) != answer.crc32c:
                    raise CheckpointDamaged(f"what {host} sent was changed on the way")

    def list(self, host: str, run: str) -> list[Label]:
        """All of the run."""
        with self._talking(host, _READ_SECONDS) as link:
            answer = self._answer(host, link, messages.List(run=run))
            return answer.labels if isinstance(answer, Labels) else []

    def forget(self, host: str, label: Label) -> None:
        """At once."""
        with self._talking(host) as link:
            self._answer(host, link, Forget(label=label))

    def end(self, host: str) -> None:
        """Waits until its socket is closed."""
        with contextlib.suppress(PeerAbsent), self._talking(host) as link:
            self._answer(host, link, End())
            while link.recv(1):
                pass
        self._hang_up(host)

    def close(self) -> None:
        """Hang up; the holders stay."""
        for host in list(self._idle):
            self._hang_up(host)

    @contextlib.contextmanager
    def _talking(self, host: str, seconds: float | None = None) -> Iterator[socket.socket]:
        """A connection for one talk; one that breaks off is not used again, as nobody knows what would come next."""
        link = self._taken(host)
        patience = self._peers.patience_seconds
        link.settimeout(patience if seconds is None else min(seconds, patience))
        try:
            yield link
        except TimeoutError:
            link.close()
            raise TimedOut(
                f"the holder of {host} is there and does not answer",
                fix="see whether it stands still; a holder that is ended is started again",
            )
        except (OSError, ProtocolError) as failure:
            link.close()
            raise PeerAbsent(
                f"the holder of {host} does not answer any more: {failure}",
                fix="see whether the host lives",
            )
        except BaseException:
            link.close()
            raise
        with self._lock:
            self._idle.setdefault(host, []).append(link)

    def _taken(self, host: str) -> socket.socket:
        while True:
            with self._lock:
                idle = self._idle.get(host)
                link = idle.pop() if idle else None
            if link is None:
                return self._connected(host)
            if not _has_ended(link):
                return link
            link.close()

    def _hang_up(self, host: str) -> None:
        with self._lock:
            links = self._idle.pop(host, [])
        for link in links:
            link.close()

    def _answer(
        self, host: str, link: socket.socket, said: Said, data: memoryview | None = None
    ) -> Answer:
        messages.send(link, said, data)
        answer = messages.receive_answer(link)
        if answer is None:
            raise ConnectionResetError("it has gone")
        if isinstance(answer, Refused):
            raise messages.error_of(answer, host)
        return answer

    def _connected(self, host: str) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(self._peers.patience_seconds)
        why = "it is another user's"
        try:
            sockets.connect(link, self.directory, names.holder_name(host))
            if sockets.is_own_user(link):
                return link
        except OSError as failure:
            why = failure.strerror or str(failure)
        link.close()
        raise PeerAbsent(
            f"nobody holds memory for {host}: {why}",
            fix="see whether the host lives: its own checkpointer starts the holder",
        )

    def _launch(self, host: str) -> None:
        """When this returns a holder listens."""
        peers = self._peers
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as failure:
            raise disk_error(failure, f"{self.directory} cannot be made")
        directory = self.directory.absolute()
        helper = processes.Helper(
            name="holder",
            module="argosy.checkpoint.peers",
            arguments=(
                *(str(directory), host),
                *(f"--memory-bytes={peers.memory_bytes}", f"--keep={peers.keep}"),
                f"--linger-seconds={peers.linger_seconds}",
            ),
            directory=directory,
            socket=names.holder_name(host),
        )
        why = processes.start(helper, seconds=_START_SECONDS)
        if why:
            raise ClusterError(
                f"no holder can be started for {host}{why}",
                fix=f"see whether {self.directory} can hold a socket",
            )


def _default_directory() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"argosy-peers-{os.getuid()}"


def _has_ended(link: socket.socket) -> bool:
    """Whether the other side has hung up meanwhile: nobody speaks without being asked."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(0))
