"""A rank's end of a training benchmark: it steps when it is told to, and says when each turn began and ended.

All sides use this one, ours and the peers', in processes that live as long as the benchmark: hundreds of turns can then be interleaved.
Times are CLOCK_MONOTONIC, which all processes of a host share. No torch here.
"""

from __future__ import annotations

import json
import os
import socket
import time


class Baton:
    """`before()` each step, `after(loss)` it; between turns `before` sleeps in a read."""

    def __init__(self, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ["BENCH_SOCKET"])
        self._lines = self._socket.makefile("rb")
        self._left = 0
        self._began = 0
        self._losses: list[float] = []
        self._say(rank=rank, pid=os.getpid())

    def before(self) -> bool:
        """Whether there is a step to do; false when the benchmark has what it wants."""
        if self._left == 0:
            line = self._lines.readline()
            if not line:
                return False
            self._left = int(line)
            self._began = time.monotonic_ns()
        return self._left > 0

    def after(self, loss: float) -> None:
        self._left -= 1
        self._losses.append(loss)
        if self._left == 0:
            ended = time.monotonic_ns()
            self._say(began=self._began, ended=ended, losses=self._losses)
            self._losses = []

    def _say(self, **what: object) -> None:
        self._socket.sendall(json.dumps(what).encode() + b"\n")
