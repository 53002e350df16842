"""SimulatedNetwork: links that delay, lose, double and reorder messages, and that can be cut.

A link has an epoch: what was sent on an earlier connection never arrives on a later one, as with real sockets. Within a
connection nothing is promised. Used by the simulated cluster; seeded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from argosy.protocol.messages import FromAgent, FromController
from argosy.testing.clock import VirtualClock

# So often a message is really encoded and decoded on its way; the rest travel as objects, for speed.
ENCODED_EVERY = 16
_TO_CONTROLLER = msgspec.json.Decoder(FromAgent)
_TO_AGENT = msgspec.json.Decoder(FromController)


@dataclass(slots=True)
class Weather:
    """How bad the network is."""

    delay_seconds: float = 0.002
    jitter_seconds: float = 0.01
    loss: float = 0.02
    doubling: float = 0.02


class SimulatedNetwork:
    """Connections between hosts and the controller."""

    def __init__(self, clock: VirtualClock, random: Random, weather: Weather) -> None:
        self.clock = clock
        self.random = random
        self.weather = weather
        self.epochs: dict[str, int] = {}
        self.cut: set[str] = set()
        self.num_sent = 0
        self.num_lost = 0

    def connect(self, host: str) -> int:
        """A new connection of the host; earlier ones are dead."""
        self.epochs[host] = self.epochs.get(host, 0) + 1
        return self.epochs[host]

    def close(self, host: str) -> None:
        """Nothing of the present connection arrives any more."""
        self.epochs[host] = self.epochs.get(host, 0) + 1

    def send(self, host: str, message: Any, deliver: Callable[[Any], None]) -> None:
        """One message in either direction, on the host's present connection."""
        self.num_sent += 1
        if self.num_sent % ENCODED_EVERY == 0:
            decoder = _TO_CONTROLLER if isinstance(message, FromAgent) else _TO_AGENT
            message = decoder.decode(msgspec.json.encode(message))
        weather, draw = self.weather, self.random.random
        copies = 1
        if host in self.cut or draw() < weather.loss:
            copies = 0
            self.num_lost += 1
        elif draw() < weather.doubling:
            copies = 2
        epoch = self.epochs.get(host, 0)

        def arrive() -> None:
            if self.epochs.get(host, 0) == epoch and host not in self.cut:
                deliver(message)

        for _ in range(copies):
            self.clock.call_later(weather.delay_seconds + weather.jitter_seconds * draw(), arrive)
