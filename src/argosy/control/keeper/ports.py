"""Ports held for runs: bound and not listening, so that the run's own process can take them over.

Both the holder and the taker set SO_REUSEADDR; Linux then lets a second socket bind and listen. Called by the agent's
`reserve`, `unreserve` and `end_run`, and for the stores of gangs.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

LOOPBACK = "127.0.0.1"
_MOST_PORTS = 4096


class PortError(Exception):
    """A port cannot be had; says which one and why."""


def bind_port(host: str, number: int) -> socket.socket:
    """A socket that holds the port until it is closed; 0: any. Raises PortError that names it."""
    if not 0 <= number <= 65535:
        raise PortError(f"port {number} is not between 0 and 65535")
    if number == 0:
        # A number that the kernel chose would be free again when the socket listens no longer; one that was asked for is kept.
        with _bind(host, 0) as found:
            return _bind(host, found.getsockname()[1])
    return _bind(host, number)


def _bind(host: str, number: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, number))
    except OSError as error:
        sock.close()
        raise PortError(_why(host, number, error))
    return sock


class Reservations:
    """The ports of each run, by key."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, socket.socket]] = {}

    def reserve(self, run: str, ports: dict[str, int]) -> dict[str, int]:
        """Hold all of them or none; a key that is held already keeps its port."""
        if len(ports) > _MOST_PORTS:
            raise PortError(f"{len(ports)} ports are more than {_MOST_PORTS}")
        held = self._held.setdefault(run, {})
        fresh: dict[str, socket.socket] = {}
        try:
            for key, number in ports.items():
                old = held.get(key)
                if old is not None and number in (0, old.getsockname()[1]):
                    continue
                if old is not None:
                    raise PortError(f"{key} of run {run} holds port {old.getsockname()[1]} already")
                fresh[key] = self._bind(run, key, number)
        except PortError:
            for sock in fresh.values():
                sock.close()
            if not held:
                del self._held[run]
            raise
        held.update(fresh)
        return {key: held[key].getsockname()[1] for key in ports}

    def release(self, run: str) -> int:
        """Let go of a run's ports; how many there were."""
        held = self._held.pop(run, {})
        for sock in held.values():
            sock.close()
        return len(held)

    def listing(self) -> dict[str, dict[str, int]]:
        """run -> key -> number."""
        return {
            run: {key: sock.getsockname()[1] for key, sock in held.items()}
            for run, held in self._held.items()
        }

    def to_state(self) -> dict[str, dict[str, int]]:
        """For a successor program: descriptors by number."""
        return {
            run: {key: sock.fileno() for key, sock in held.items()}
            for run, held in self._held.items()
        }

    def take_state(self, state: dict[str, dict[str, int]]) -> None:
        """Go on with the predecessor's sockets."""
        for run, held in state.items():
            self._held[run] = {key: socket.socket(fileno=fd) for key, fd in held.items()}

    def _bind(self, run: str, key: str, number: Any) -> socket.socket:
        if not isinstance(number, int) or isinstance(number, bool):
            raise PortError(f"{key} of run {run}: {number!r} is not a port number")
        if number:
            for other, held in self._held.items():
                for sock in held.values():
                    if sock.getsockname()[1] == number:
                        raise PortError(f"port {number} is held for run {other}")
        return bind_port(LOOPBACK, number)


def _why(host: str, number: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {number} on {host} is in use"
    return f"port {number} on {host}: {error.strerror}"
